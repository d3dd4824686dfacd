"use strict";
// Shows the report that stands in the page as data. What comes from files becomes text, never HTML.

const report = JSON.parse(document.getElementById("data").textContent);
const runs = report.runs;
const first = runs[0];
const isAlone = runs.length === 1;

const GLYPHS = { stage: "◆", batch: "■", data: "▼", spike: "▲", recovery: "●", launch: "○", other: "·" };
const KINDS = {
  stage: "stage",
  batch: "micro-batch",
  data: "data",
  spike: "spike",
  recovery: "recovery",
  launch: "launch",
  other: "",
};
const STATES = {
  begun: "○ begun",
  running: "● running",
  finished: "✓ finished",
  stopped: "■ stopped",
  diverged: "▲ diverged",
};
const DASHES = [[], [10, 4], [2, 3], [12, 3, 2, 3]];
const COLOURS = 6;
const DRAWN = { step: "each step", typical: "typical", validation: "validation", band: "expected" };
const LONG_RUN = 2000; // steps, of which the first tenth would flatten the rest

// ---- the page's parts

const byId = (id) => document.getElementById(id);

// What it contains, after its attributes if it has any; strings become text.
function element(name, ...content) {
  const made = document.createElement(name);
  const attributes = content[0]?.constructor === Object ? content.shift() : {};
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}

// Rows begin with their name; a column of figures stands to the right.
function table(sheet, caption, wide = -1) {
  const isFigure = sheet.columns.map(
    (_, column) =>
      column > 0 && column !== wide && sheet.rows.every((row) => /^[-+]?[\d–].{0,15}$/.test(row[column])),
  );
  const cell = (name, text, column, more = {}) => {
    const kind = isFigure[column] ? "number" : column === wide ? "wide" : "";
    return element(name, { class: kind, ...more }, text);
  };
  const head = sheet.columns.map((text, column) => cell("th", text, column, { scope: "col" }));
  const rows = sheet.rows.map((row) =>
    element(
      "tr",
      ...row.map((text, column) =>
        column ? cell("td", text, column) : cell("th", text, column, { scope: "row" }),
      ),
    ),
  );
  return element(
    "figure",
    element("figcaption", caption),
    element(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      element(
        "table",
        { class: wide < 0 ? "" : "full", "aria-label": caption },
        element("thead", element("tr", ...head)),
        element("tbody", ...rows),
      ),
    ),
  );
}

function folded(title, ...content) {
  return element("details", element("summary", title), ...content);
}

// A section with a part for each run that has something to tell; without any it is not shown.
function section(id, partOf, isNarrow = true) {
  const body = byId(id).querySelector(".body");
  body.classList.toggle("side-by-side", !isAlone && isNarrow);
  for (const run of runs) {
    const parts = partOf(run);
    if (!parts.length) continue;
    const title = isAlone ? [] : [element("h3", run.name)];
    body.append(element("div", { class: "per-run" }, ...title, ...parts));
  }
  byId(id).hidden = !body.childElementCount;
}

// ---- numbers in words

// In figures enough to be told from another one that is `apart` from it.
function compact(number, apart) {
  const size = Math.abs(number);
  const [unit, name] = [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "k"],
    [1, ""],
  ].find(([one]) => size >= one) || [1, ""];
  const digits = apart > 0 ? Math.floor(Math.log10(size)) - Math.floor(Math.log10(apart)) + 2 : 0;
  return String(Number((number / unit).toPrecision(Math.min(Math.max(digits, 4), 15)))) + name;
}

const figures = (digits) => (number) => number.toFixed(digits);
const scientific = (number) => (number === 0 ? "0" : number.toExponential(1).replace("e-", "e−"));
const percent = (number) => `${Number((100 * number).toPrecision(3))} %`;

const longest = Math.max(0, ...runs.map((run) => run.seconds));
const timeUnit = longest < 300 ? ["seconds", 1] : longest < 7200 ? ["minutes", 60] : ["hours", 3600];

const AXES = {
  tokens: { of: (place) => place.tokens, told: compact, label: "tokens" },
  seconds: {
    of: (place) => place.seconds / timeUnit[1],
    told: (value) => String(Number(value.toPrecision(5))),
    label: timeUnit[0],
  },
};

function along(columns, axis) {
  const places = columns[axis] || [];
  return axis === "tokens" ? places : places.map((seconds) => seconds / timeUnit[1]);
}

// ---- colours, which the charts' canvases take from the style sheet

const probe = document.body.appendChild(element("i", { hidden: "" }));

function ink(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const colourOf = (run, kind) =>
  isAlone && kind === "validation" ? "validation" : `run-${runs.indexOf(run) % COLOURS}`;
const dashOf = (run) => DASHES[runs.indexOf(run) % DASHES.length];

// ---- charts

const view = { axis: "tokens", height: "all", hidden: new Set() };
const charts = [];
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

function line(run, kind, columns, name, more = {}) {
  return {
    run,
    kind,
    x: along(columns, view.axis),
    y: columns[name] || [],
    isHidden: view.hidden.has(`kind ${kind}`) || view.hidden.has(`run ${runs.indexOf(run)}`),
    ...more,
  };
}

// The lines of the main chart, those behind first; every step is faint where a typical loss is drawn.
// A label is drawn where its line ends.
function lossLines() {
  const isNoisy = (run) => run.curve.loss && run.curve.loss.length > 8;
  const training = (run) => (isAlone ? "training" : run.name);
  const alpha = isAlone && first.steps <= LONG_RUN ? 0.3 : 0.18; // the denser, the fainter
  const ofSteps = (run) => (isNoisy(run) ? { width: 1, alpha } : { label: training(run) });
  const ofEvaluations = { hasPoints: true, width: 1.6, label: isAlone ? "validation" : "" };
  return [
    line(first, "band", first.curve, "expected_high", { label: "expected" }),
    line(first, "band", first.curve, "expected_low"),
    ...runs.map((run) => line(run, "step", run.curve, "loss", ofSteps(run))),
    ...runs
      .filter(isNoisy)
      .map((run) => line(run, "typical", run.curve, "typical", { width: 2.4, label: training(run) })),
    ...runs.map((run) => line(run, "validation", run.evaluations, "val_loss", ofEvaluations)),
  ].filter((one) => one.y.length);
}

const MEASURES = [
  {
    title: "Validation loss, nats a token",
    part: "evaluations",
    name: "val_loss",
    told: figures(3),
    hasPoints: true,
  },
  {
    title: "Validation loss, bits a byte",
    part: "evaluations",
    name: "bits_per_byte",
    told: figures(3),
    hasPoints: true,
  },
  {
    title: "Learning rate",
    part: "curve",
    name: "lr",
    told: scientific,
    toldOnAxis: scientific,
    fromZero: true,
  },
  {
    title: "Gradient norm, before clipping",
    part: "curve",
    name: "grad_norm",
    told: (value) => compact(value),
    isLog: true,
  },
  {
    title: "Tokens a second",
    part: "curve",
    name: "tokens_per_s",
    told: compact,
    fromZero: true,
    hasMarks: true,
  },
  {
    title: "MFU, of the card's peak",
    part: "curve",
    name: "mfu",
    told: percent,
    toldOnAxis: percent,
    fromZero: true,
    hasMarks: true,
  },
];

function seriesOf(one) {
  const colour = () => ink(one.kind === "band" ? colourOf(one.run) : colourOf(one.run, one.kind));
  return {
    show: !one.isHidden,
    stroke: colour,
    width: one.kind === "band" ? 1 : one.width || 1.8,
    dash: { band: [2, 3], step: [], validation: [5, 4] }[one.kind] || dashOf(one.run),
    alpha: one.alpha || 1,
    points: {
      show: (u) =>
        (Boolean(one.hasPoints) && one.y.length * 14 < u.bbox.width / devicePixelRatio) || one.y.length === 1,
      size: 6,
      width: 1.5,
      stroke: colour,
      fill: () => ink("paper"),
    },
  };
}

// Draws lines in a host; `how` is what differs between charts.
function chart(host, lines, how) {
  host.replaceChildren();
  if (!lines.length) {
    host.append(element("p", { class: "empty" }, "No step is recorded yet"));
    return;
  }
  const drawable = (ys) => (how.isLog ? ys.map((y) => (y > 0 ? y : null)) : ys);
  const data = uPlot.join(lines.map((one) => [one.x, drawable(one.y)]));
  const size = { width: host.clientWidth, height: host.clientHeight };
  host.chart = new uPlot({ ...size, ...optionsOf(lines, how) }, data, host);
  host.chart.lines = lines;
  charts.push(host.chart);
}

function optionsOf(lines, { isMain, isLog, hasMarks, toldOnAxis = compact, readout, ...how }) {
  const axis = AXES[view.axis];
  const band = lines.findIndex((one) => one.kind === "band") + 1;
  const range = (u, low, high) => heightOf(u, low, high, how.fromZero, isMain && lines);
  return {
    padding: isMain ? [26, labelRoom(lines), 0, 0] : [10, 12, 0, 0],
    legend: { show: false },
    cursor: cursorOf(lines),
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range } },
    axes: [
      axisStyle({ values: toldTicks(axis.told), space: 64, size: 28, ...(isMain && labelled(axis.label)) }),
      axisStyle({ values: toldTicks(toldOnAxis), space: 34, size: widthOfTicks }),
    ],
    series: [{}, ...lines.map(seriesOf)],
    bands: band ? [{ series: [band, band + 1], fill: () => faint(ink(colourOf(first))) }] : [],
    hooks: {
      drawClear: [(u) => drawMarks(u, hasMarks ? first.marks : [], isMain)],
      draw: isMain ? [(u) => drawLabels(u, lines)] : [],
      setCursor: [(u) => readout(u, lines)],
      setScale: [(u, key) => key === "x" && noticeZoom(u)],
    },
  };
}

// All charts have one cursor; it shows points on lines, and none on noise and on the band.
function cursorOf(lines) {
  const isPlain = (u, index) => u.series[index].alpha === 1 && lines[index - 1].kind !== "band";
  return {
    sync: { key: "report", scales: ["x", null] },
    drag: { x: true, y: false },
    y: false,
    dataIdx: nearestValue,
    points: {
      size: (u, index) => (isPlain(u, index) ? 8 : 0),
      width: 2,
      fill: (u, index) => ink(colourOf(lines[index - 1].run, lines[index - 1].kind)),
    },
  };
}

const axisStyle = (more) => ({
  stroke: () => ink("muted"),
  font: FONT,
  grid: { stroke: () => ink("line"), width: 1 },
  ticks: { show: false },
  gap: 7,
  ...more,
});

const labelled = (label) => ({ label, labelFont: FONT, labelSize: 20, labelGap: 0 });

const toldTicks = (told) => (u, ticks, axis, room, apart) =>
  ticks.map((tick) => (tick === null ? "" : told(tick, apart)));

function widthOfTicks(u, texts) {
  u.ctx.font = FONT;
  return Math.max(24, ...(texts || []).map((text) => u.ctx.measureText(text).width)) + 12;
}

const faint = (colour) => `color-mix(in srgb, ${colour} 13%, transparent)`;

// For the end of the curves their first tenth, where losses fall from high up, does not count, nor
// does how high a single step is: spikes then leave the picture at its top.
function heightOf(u, low, high, fromZero, lines) {
  if (low === null) return [0, 1];
  if (lines && view.height === "end") {
    const xs = u.data[0];
    const from = xs[0] + (xs[xs.length - 1] - xs[0]) / 10;
    const late = (counts) =>
      extent(
        u.data
          .slice(1)
          .flatMap((ys, index) =>
            u.series[index + 1].show && counts(lines[index])
              ? ys.filter((y, at) => xs[at] >= from && Number.isFinite(y))
              : [],
          ),
      );
    const isWhole = u.scales.x.min <= xs[0];
    const [lowest] = late(() => true);
    const [, highest] = late((one) => one.alpha === undefined);
    if (isWhole && lowest < highest) [low, high] = [lowest, highest];
  }
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [fromZero ? Math.min(0, low) : low - room, high + room];
}

const extent = (values) =>
  values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

// Lines have their points at different places: each shows the one nearest to the cursor.
function nearestValue(u, series, index) {
  const ys = u.data[series];
  const xs = u.data[0];
  if (series === 0 || ys[index] != null) return index;
  let before = index,
    after = index;
  while (before >= 0 && ys[before] == null) before--;
  while (after < ys.length && ys[after] == null) after++;
  if (before < 0 || after >= ys.length) return before < 0 ? (after < ys.length ? after : null) : before;
  return xs[index] - xs[before] <= xs[after] - xs[index] ? before : after;
}

function noticeZoom(u) {
  const xs = u.data[0];
  byId("unzoom").hidden = !(u.scales.x.min > xs[0] || u.scales.x.max < xs[xs.length - 1]);
}

// ---- what is drawn beside the lines

function inPixels(u, draw) {
  u.ctx.save();
  u.ctx.scale(devicePixelRatio, devicePixelRatio);
  u.ctx.font = FONT;
  draw(
    u.ctx,
    u.bbox.left / devicePixelRatio,
    u.bbox.top / devicePixelRatio,
    u.bbox.width / devicePixelRatio,
    u.bbox.height / devicePixelRatio,
  );
  u.ctx.restore();
}

function drawMarks(u, marks, isLabelled) {
  inPixels(u, (context, left, top, width, height) => {
    let labelledUpTo = -Infinity;
    const end = u.data[0][u.data[0].length - 1]; // the newest mark may be where no step is told of yet
    const placed = marks.map((mark, index) => [
      u.valToPos(Math.min(AXES[view.axis].of(mark), end), "x"),
      mark,
      index,
    ]);
    for (const [at, mark, index] of placed.sort(([one], [other]) => one - other)) {
      if (at < 0 || at > width) continue;
      context.strokeStyle = context.fillStyle = ink("muted");
      context.globalAlpha = isLabelled ? 0.75 : 0.35;
      context.setLineDash([1, 3]);
      context.beginPath();
      context.moveTo(left + at, top);
      context.lineTo(left + at, top + height);
      context.stroke();
      const label = `${GLYPHS[mark.kind]}${index + 1}`;
      if (!isLabelled || at < labelledUpTo) continue;
      context.globalAlpha = 1;
      context.fillStyle = ink(mark.is_warning ? "bad" : "muted");
      context.textAlign = "center";
      context.fillText(label, left + at, top - 8);
      labelledUpTo = at + context.measureText(label).width + 5;
    }
  });
}

const labelledOf = (lines) => lines.filter((one) => one.label && !one.isHidden);

function labelRoom(lines) {
  const context = document.createElement("canvas").getContext("2d");
  context.font = FONT;
  return Math.max(
    14,
    ...labelledOf(lines).map((one) => context.measureText(shortened(one.label)).width + 14),
  );
}

const shortened = (text) => (text.length > 18 ? `${text.slice(0, 17)}…` : text);

// The names of the lines where they end, moved apart where they would cover each other.
function drawLabels(u, lines) {
  const ends = labelledOf(lines)
    .map((one) => {
      const last = one.y.findLastIndex((y, at) => y !== null && one.x[at] <= u.scales.x.max);
      return { one, x: u.valToPos(one.x[last], "x"), y: u.valToPos(one.y[last], "y") };
    })
    .filter(({ x, y }) => Number.isFinite(x + y))
    .sort((a, b) => a.y - b.y);
  inPixels(u, (context, left, top, width, height) => {
    let lowest = -Infinity;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (const { one, y } of ends) {
      lowest = Math.max(Math.min(Math.max(y, 0), height), lowest + 15);
      context.fillStyle = ink(one.kind === "band" ? "muted" : colourOf(one.run, one.kind));
      context.fillText(shortened(one.label), left + width + 8, top + lowest);
    }
  });
}

// ---- what is under the cursor

// The value of each line; null where it has none or is not shown.
function valuesAt(u) {
  return u.series.slice(1).map((series, index) => {
    const value = u.data[index + 1][u.cursor.idxs?.[index + 1]];
    return series.show && Number.isFinite(value) ? value : null;
  });
}

// In the legend the values of each kind of line, of several runs those of their typical losses;
// below the chart where that is, and what happened there.
function readMain(u, lines) {
  const values = valuesAt(u);
  for (const shown of document.querySelectorAll("#legend .value")) {
    const [what, which] = shown.dataset.of.split(" ");
    const isMeant = ({ kind, run }) =>
      what === "run" ? run === runs[which] && kind === "typical" : isAlone && kind === which;
    const meant = values.filter((value, index) => value !== null && isMeant(lines[index]));
    shown.textContent = meant
      .sort((one, other) => one - other)
      .map(figures(3))
      .join(" to ");
  }
  const { left, idx } = u.cursor;
  const axis = AXES[view.axis];
  const isInside = left >= 0 && idx != null;
  const isNear = (mark) => Math.abs(u.valToPos(axis.of(mark), "x") - left) < 6;
  const told = first.marks.filter(isNear).map((mark) => `${GLYPHS[mark.kind]} ${mark.text}`);
  const where = `${axis.told(u.posToVal(left, "x"))} ${axis.label}`;
  byId("readout").textContent = isInside ? [where, ...told].join("   ") : "";
}

const readMeasure = (shown, told) => (u) => {
  shown.textContent = valuesAt(u)
    .filter((value) => value !== null)
    .map(told)
    .join(" · ");
};

// Arrows move the cursor from point to point, with shift by ten; Escape shows all again.
function listenToKeys(host) {
  host.tabIndex = 0;
  host.setAttribute("role", "group");
  host.addEventListener("keydown", (event) => {
    const u = host.chart;
    if (!u) return;
    if (event.key === "Escape") unzoom();
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const start = u.cursor.idx ?? (move > 0 ? -1 : u.data[0].length);
    const index = Math.min(Math.max(start + move * (event.shiftKey ? 10 : 1), 0), u.data[0].length - 1);
    u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: 0 });
    byId("readout").setAttribute("aria-live", "polite");
  });
}

function unzoom() {
  for (const plot of charts) plot.setData(plot.data);
}

// ---- all charts, anew whenever the view changes

function drawCharts() {
  for (const plot of charts.splice(0)) plot.destroy();
  byId("unzoom").hidden = true;
  const lines = lossLines();
  document.querySelector(".tools").hidden = !lines.length;
  chart(byId("loss-plot"), lines, { isMain: true, hasMarks: true, readout: readMain });
  for (const measure of MEASURES.filter((one) => one.host)) {
    const { host, part, name, shownValue, told } = measure;
    const ofRuns = runs.map((run) => line(run, "measure", run[part], name, measure));
    const readout = readMeasure(shownValue, told);
    chart(
      host,
      ofRuns.filter((one) => one.y.length),
      { ...measure, readout },
    );
  }
}

function addMeasures() {
  const body = byId("measures").querySelector(".body");
  for (const measure of MEASURES) {
    if (!runs.some((run) => run[measure.part][measure.name])) continue;
    measure.shownValue = element("span", { class: "value" });
    measure.host = element("div", {
      class: "plot",
      "aria-label": `${measure.title}; the arrow keys move along it`,
    });
    body.append(element("figure", element("h3", measure.title, measure.shownValue), measure.host));
    listenToKeys(measure.host);
  }
  byId("measures").hidden = !body.childElementCount;
}

function addLegend() {
  const item = (key, swatch, colour, text) => {
    const mark = element("i", { class: `swatch ${swatch}`, "aria-hidden": "true" });
    mark.style.color = `var(--${colour})`;
    const button = element(
      "button",
      { type: "button", "aria-pressed": "true" },
      mark,
      text,
      element("span", { class: "value", "data-of": key }),
    );
    button.addEventListener("click", () => {
      const wasHidden = view.hidden.delete(key);
      if (!wasHidden) view.hidden.add(key);
      button.setAttribute("aria-pressed", String(wasHidden));
      drawCharts();
    });
    return button;
  };
  const kinds = new Set(lossLines().map((one) => one.kind));
  const items = isAlone
    ? []
    : runs.map((run, index) =>
        item(`run ${index}`, `dash-${index % DASHES.length}`, colourOf(run), run.name),
      );
  for (const [kind, text] of Object.entries(DRAWN)) {
    const colour = isAlone ? colourOf(first, kind) : "muted";
    if (kinds.has(kind))
      items.push(
        item(`kind ${kind}`, kind, colour, kind === "band" && !isAlone ? `${text} of ${first.name}` : text),
      );
  }
  byId("legend").append(...items);
}

// ---- the sections

function addHeader() {
  document.title = `${first.name}: ${first.verdict}`;
  byId("name").textContent = `${first.name} · training report`;
  byId("state").textContent = STATES[first.state];
  byId("state").classList.add(first.state);
  byId("verdict").textContent = first.verdict;
  if (first.share !== null && first.state !== "finished") {
    byId("share").hidden = false;
    byId("share").value = first.share;
  }
  byId("heard").append(...heard(first));
  byId("others").hidden = isAlone;
  for (const run of runs.slice(1)) {
    byId("others").append(element("li", element("b", run.name), ` ${STATES[run.state]} · ${run.verdict}`));
  }
}

function heard(run) {
  if (!run.heard_at) return [run.advice];
  const at = new Date(1000 * run.heard_at);
  const agoS = Date.now() / 1000 - run.heard_at;
  const [unit, unitS] = [
    ["day", 86400],
    ["hour", 3600],
    ["minute", 60],
  ].find(([, size]) => agoS >= size) || ["second", 1];
  const ago = new Intl.RelativeTimeFormat("en").format(-Math.round(agoS / unitS), unit);
  const told = `Last record ${at.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}, ${ago}. ${run.advice}`;
  const isGoing = run.state === "running" || run.state === "begun";
  const isSilent = isGoing && agoS > run.quiet_after_s;
  return isSilent
    ? [
        told,
        element(
          "span",
          { class: "alarm" },
          "Silent for long: if it was killed, the same command continues it.",
        ),
      ]
    : [told];
}

function addLoss() {
  byId("time-unit").textContent = timeUnit[0];
  byId("summary").textContent =
    first.summary + (isAlone ? "" : ` Marks and the expected losses are those of ${first.name}.`);
  const sheet = first.evaluation_sheet;
  if (sheet.rows.length)
    byId("evaluations").append(
      folded("Validation losses as a table", table(sheet, `Validation losses of ${first.name}`)),
    );
}

function addMarks() {
  section(
    "happened",
    (run) => {
      if (!run.marks.length) return [];
      const sheet = { columns: ["", "step", "tokens", "time", "what"], rows: [] };
      sheet.rows = run.marks.map((mark, index) => [
        `${GLYPHS[mark.kind]} ${index + 1} ${KINDS[mark.kind]}`,
        ...mark.told,
        mark.text,
      ]);
      const made = table(sheet, "Numbered as on the curve; ⚠ is what you may want to look at", 4);
      made.classList.add("marks");
      made
        .querySelectorAll("tbody tr")
        .forEach((row, index) => row.classList.toggle("warning", run.marks[index].is_warning));
      return run === first ? [made] : [folded(`${run.marks.length} marks`, made)];
    },
    false,
  );
}

const COMPONENTS = [
  "weights",
  "optimiser state",
  "gradients",
  "weights in half precision",
  "activations",
  "logits and loss",
  "temporaries",
];
const ANGLES = ["", "45deg", "135deg", "0deg", "90deg", "", "45deg"];
const GiB = 2 ** 30;

function component(name) {
  const found = COMPONENTS.indexOf(name);
  const place = found < 0 ? COMPONENTS.length - 1 : found;
  return {
    place,
    paint(part) {
      part.style.setProperty("--part", `var(--run-${place % COLOURS})`);
      part.classList.toggle("hatched", Boolean(ANGLES[place]));
      if (ANGLES[place]) part.style.setProperty("--angle", ANGLES[place]);
      return part;
    },
  };
}

function memoryBars(run) {
  const { stages, limit_bytes: limit, total_bytes: total } = run.memory;
  if (!stages.length) return [];
  const sums = stages.map((stage) => Object.values(stage.components).reduce((sum, size) => sum + size, 0));
  const full =
    1.04 * Math.max(limit || 0, total || 0, ...sums, ...stages.map((stage) => stage.measured_bytes || 0));
  const bars = stages.map((stage, index) => {
    const track = element("div", { class: "track", "aria-hidden": "true" });
    const parts = element("div", { class: "parts" });
    for (const [name, size] of ordered(stage.components)) {
      const part = component(name).paint(
        element("div", { class: "part", title: `${name}: ${(size / GiB).toFixed(2)} GiB` }),
      );
      part.style.width = `${(100 * size) / full}%`;
      parts.append(part);
    }
    track.append(parts);
    for (const [bytes, name, kind] of [
      [stage.measured_bytes, "measured", "above"],
      [limit, "limit", ""],
      [total, "card", ""],
    ]) {
      if (bytes) track.append(upright(bytes, full, name, kind));
    }
    return element(
      "div",
      { class: "stack" },
      element(
        "h3",
        `${stage.stage}, ${stage.micro_batch} sequences a pass: ${(sums[index] / GiB).toFixed(2)} GiB forecast`,
      ),
      track,
    );
  });
  return [...bars, memoryTable(stages, sums, limit, total)];
}

const ordered = (components) =>
  Object.entries(components).sort(([one], [other]) => component(one).place - component(other).place);

function upright(bytes, full, name, kind) {
  const share = (100 * bytes) / full;
  const label = element("span", { class: share > 80 ? "start" : "" }, name);
  const made = element("div", { class: `line ${kind}` }, label);
  made.style.left = `${share}%`;
  return made;
}

function memoryTable(stages, sums, limit, total) {
  const told = (bytes) => (bytes ? (bytes / GiB).toFixed(2) : "–");
  const names = [...new Set(stages.flatMap((stage) => ordered(stage.components).map(([name]) => name)))];
  const rows = names.map((name) => [name, ...stages.map((stage) => told(stage.components[name]))]);
  rows.push(
    ["forecast, in all", ...sums.map(told)],
    ["measured peak", ...stages.map((stage) => told(stage.measured_bytes))],
  );
  rows.push(
    ["the run's limit", ...stages.map(() => told(limit))],
    ["the card", ...stages.map(() => told(total))],
  );
  const made = table(
    { columns: ["GiB", ...stages.map((stage) => stage.stage)], rows },
    "At the peak of a step. The forecast is of tensors; libraries and the context come on top",
  );
  made.querySelectorAll("tbody th").forEach((cell, index) => {
    if (index < names.length)
      cell.prepend(component(names[index]).paint(element("i", { class: "key part", "aria-hidden": "true" })));
  });
  return made;
}

function addSamples() {
  section("samples", (run) => {
    const shown = run.samples
      .map((sample) =>
        element(
          "article",
          { class: "sample" },
          element("h3", `step ${sample.told[0]} · ${sample.told[1]} tokens · ${sample.told[2]}`),
          element("p", element("b", sample.prompt), sample.text),
        ),
      )
      .reverse();
    const last = run.samples.at(-1)?.told[0];
    const newest = run.samples.filter((sample) => sample.told[0] === last).length;
    const older = shown.slice(newest);
    return [...shown.slice(0, newest), ...(older.length ? [folded(`${older.length} earlier`, ...older)] : [])];
  });
}

function addSettings() {
  const { differing, alike } = report.settings;
  const body = byId("settings").querySelector(".body");
  const where = isAlone ? "from the defaults" : "between the runs";
  if (differing.rows.length) body.append(table(differing, `What differs ${where}`));
  else body.append(element("p", { class: "quiet" }, `Nothing differs ${where}.`));
  if (alike.rows.length)
    body.append(folded(`The other ${alike.rows.length}`, table(alike, `What does not differ ${where}`)));
}

function addFacts() {
  section("facts", (run) => [
    element(
      "dl",
      ...run.facts.flatMap(([name, text]) => [
        element("dt", name),
        element("dd", name === "command" ? element("code", text) : text),
      ]),
    ),
  ]);
}

function addNotes() {
  const made = new Date(1000 * report.made).toLocaleString("en-GB", {
    dateStyle: "medium",
    timeStyle: "short",
  });
  const notes = runs.flatMap((run) => run.notes.map((note) => (isAlone ? note : `${run.name}: ${note}`)));
  byId("notes").textContent = [
    `Made ${made}. A typical loss is the mean of the middle half of those around.`,
    ...notes,
  ].join(" ");
}

// ---- the reader's choices

function keep(key, value) {
  try {
    localStorage.setItem(`nanofit ${key}`, value);
  } catch {
    /* not kept, where nothing may be */
  }
}

function kept(key) {
  try {
    return localStorage.getItem(`nanofit ${key}`);
  } catch {
    return null;
  }
}

function fit(plot) {
  const host = plot.root.parentElement;
  if (plot.width !== host.clientWidth) plot.setSize({ width: host.clientWidth, height: host.clientHeight });
}

function setTheme(theme) {
  document.documentElement.style.colorScheme = theme;
  for (const plot of charts) plot.redraw();
}

function listen() {
  view.height = kept("height") || (first.steps > LONG_RUN ? "end" : "all");
  view.axis = kept("axis") || view.axis;
  for (const input of document.querySelectorAll(".switch input")) {
    input.checked = view[input.name] === input.value;
    input.addEventListener("change", () => {
      view[input.name] = input.value;
      keep(input.name, input.value);
      drawCharts();
    });
  }
  byId("unzoom").addEventListener("click", unzoom);
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  prefersDark.addEventListener("change", () => charts.forEach((plot) => plot.redraw()));
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.style.colorScheme || (prefersDark.matches ? "dark" : "light");
    const theme = now === "dark" ? "light" : "dark";
    keep("theme", theme);
    setTheme(theme);
  });
  if (kept("theme")) setTheme(kept("theme"));
  listenToKeys(byId("loss-plot"));
  byId("loss-plot").setAttribute("aria-label", `${first.summary} The arrow keys move along it.`);
  new ResizeObserver(() => charts.forEach(fit)).observe(document.querySelector("main"));
}

// Served by report.py --watch, the page asks now and then when the newest one was made.
function watch() {
  if (!["127.0.0.1", "localhost"].includes(location.hostname)) return;
  setInterval(async () => {
    const answer = await fetch("made").catch(() => null);
    if (answer?.ok && Number(await answer.text()) !== report.made) location.reload();
  }, 2000);
}

addHeader();
addLoss();
addLegend();
addMarks();
section("plan", (run) => [
  table(
    run.plan,
    "The error is what happened against what was planned; of a loss, how far it is from the middle",
  ),
]);
addMeasures();
section("stages", (run) =>
  run.stages.rows.length ? [table(run.stages, "Medians over the steps of a stage")] : [],
);
section("memory", memoryBars);
addSamples();
addSettings();
addFacts();
addNotes();
listen();
drawCharts();
watch();
