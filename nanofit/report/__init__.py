"""What a run has been through: records -> a page, a picture.

Others use `history` (read_history), `report` (report_of: a history in texts, tables and columns to
draw), `page` (page_of: a report as one HTML file), `chart_png` (save_png) and `watch` (Latest,
serve). Its own: `curves` (few points, every spike), `marks` (events in words), `outcome` (where a
run is or how it ended), `sheets` (tables of that) and `particulars` (what it is).
"""
