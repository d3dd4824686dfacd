"""The parts shared by the scripts in the project's root; each file is one part."""
