// One chart (uPlot): a title, the plot, and a legend whose entries hide and show their curve.
//
// Charts of one axis share the cursor and the zoom. A drag zooms, a double click or Escape shows
// all; the arrow keys move the cursor.

import { bytes, el, patch } from "../frame/draw.js";
import { joined, shortNumber, smoothed } from "./curves.js";
import { ends, paint, wordsOf } from "./heat.js";

const charts = { step: new Set(), time: new Set() };
const zooms = { step: null, time: null };
const HEIGHT = 210, TALL = 420, DENSE = 600;

export const onZoom = new Set(); // called with (axis, [first, last] or null)

export function zoom(axis, range) {
  zooms[axis] = range;
  for (const chart of charts[axis]) chart.applyZoom();
  for (const listener of onZoom) listener(axis, range);
}

export const zoomOf = (axis) => zooms[axis];

export class Chart {
  // spec: {key, title, unit, stacked, percent, isShare, isHeat}; axis: "step" or "time"; hidden: labels not shown
  constructor(spec, axis, hidden = []) {
    this.spec = spec;
    this.axis = axis;
    this.hidden = new Set(hidden);
    this.isLog = this.isTall = false;
    this.plot = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": this.spec.title, onkeydown: (event) => this.onKey(event) });
    this.legend = el("div", { class: "legend" });
    this.node = el("figure", { class: "panel chart", "data-chart": spec.key },
      el("figcaption", {}, el("h3", {}, spec.title), el("small", {}, spec.unit), el("span", { class: "tools" },
        spec.stacked || spec.isHeat ? null : this.tool("log", "Logarithmic axis", () => { this.isLog = !this.isLog; return this.isLog; }),
        this.tool("⤢", "Larger", () => { this.isTall = !this.isTall; this.node.classList.toggle("wide", this.isTall); return this.isTall; }))),
      this.plot, this.legend);
    this.isSeen = false;
    this.seen = new IntersectionObserver((entries) => {
      this.isSeen = entries.at(-1).isIntersecting; // a busy browser sends several entries at once, the newest last
      if (this.isSeen && this.isDue) this.draw();
    }, { rootMargin: "200px" });
    this.seen.observe(this.node);
    this.resized = new ResizeObserver(() => this.uplot && this.uplot.setSize(this.size()));
    this.resized.observe(this.plot);
    charts[axis].add(this);
  }

  tool(sign, words, toggle) {
    const button = el("button", { type: "button", "aria-pressed": "false", "aria-label": `${words}: ${this.spec.title}`, title: words, onclick: () => {
      button.setAttribute("aria-pressed", String(toggle()));
      this.rebuild();
    } }, sign);
    return button;
  }

  size() {
    return { width: Math.max(120, this.plot.clientWidth), height: this.isTall ? TALL : HEIGHT };
  }

  // curves: [{name of the metric, label, x, values, colour, dash, band: [low, high] or null}]; weight: of the smoothing
  show(curves, weight, isRelative) {
    this.curves = curves;
    this.weight = this.spec.stacked || this.spec.table || this.spec.isHeat ? 0 : weight; // evaluations are few
    this.isRelative = isRelative;
    this.node.hidden = !curves.some(({ values }) => values.some((value) => value !== null && value !== undefined));
    this.isDue = true;
    if (this.isSeen && !this.node.hidden) this.draw();
  }

  draw() {
    this.isDue = false;
    const shown = this.curves.filter(({ label }) => !this.hidden.has(label));
    const shape = JSON.stringify([this.isLog, this.weight > 0, this.isRelative, shown.map(({ label, colour, dash, band }) => [label, colour, dash, Boolean(band)])]);
    const tables = this.spec.stacked ? this.stack(shown) : shown.map((curve) => this.columnsOf(curve));
    const rows = tables.length ? joined(tables) : [[]];
    if (this.uplot && shape === this.shape) {
      this.uplot.setData(rows);
      this.applyZoom();
    } else {
      this.shape = shape;
      this.build(shown, rows);
    }
    this.describe(shown);
    this.drawLegend();
  }

  columnsOf({ x, values, band }) {
    if (this.spec.isHeat) return { x, columns: ends(values) };
    const columns = this.weight ? [values, smoothed(values, this.weight)] : [values];
    return { x, columns: [...columns, ...(band ?? [])] };
  }

  // Areas are drawn from the sum of all to the first one, each over the one before.
  stack(shown) {
    if (!shown.length) return [];
    const sums = [];
    shown.forEach(({ values }, at) => sums.push(values.map((value, row) => (value === null ? null : value + (at ? sums[at - 1][row] ?? 0 : 0)))));
    return [{ x: shown[0].x, columns: sums.reverse() }];
  }

  build(shown, rows) {
    this.uplot?.destroy();
    const { series, bands } = this.spec.isHeat ? { series: [NO_LINE, NO_LINE], bands: [] } : this.spec.stacked ? stackedSeries(shown) : lineSeries(shown, this.weight, rows[0].length > DENSE ? 1 : 1.75);
    const grid = { stroke: colourOf("--line"), width: 1 }, ticks = grid, stroke = colourOf("--dim"), font = "12px system-ui, sans-serif";
    const options = {
      ...this.size(), series: [{}, ...series], bands, legend: { show: false }, padding: [8, this.axis === "time" ? 28 : 14, 0, 0],
      scales: { x: { time: this.axis === "time" }, y: this.isLog ? { distr: 3 } : { range: (_, low, high) => this.rangeOf(low, high) } },
      axes: [
        { stroke, grid: { show: false }, ticks, font, size: 30, ...(this.axis === "time" ? { values: clock, space: 80 } : {}) },
        { stroke, grid, ticks, font, size: (_, shown) => Math.max(52, 20 + 7 * Math.max(0, ...(shown ?? []).map((words) => words?.length ?? 0))), values: (_, values) => values.map((value) => this.words(value)) },
      ],
      cursor: {
        sync: { key: this.axis, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        drag: { x: true, y: false, setScale: false }, points: { size: 7 }, focus: { prox: 24 },
        bind: { dblclick: () => () => zoom(this.axis, null) },
      },
      focus: { alpha: 0.35 },
      hooks: {
        setCursor: [() => this.drawLegend()],
        drawAxes: [(u) => { if (this.spec.isHeat && this.curves.length) paint(u, this.curves[0], colourOf(this.curves[0].colour)); }],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          zoom(this.axis, [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    };
    this.uplot = new uPlot(options, rows, this.plot);
    this.applyZoom();
  }

  rangeOf(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.spec.percent || (this.spec.isShare && low >= 0 && high <= 1)) return [0, 1];
    if (this.spec.isHeat) return [low, high];
    if (this.spec.stacked) return [0, high * 1.05 || 1];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
    // a curve of shares or counts stands on zero
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  applyZoom() {
    if (!this.uplot) return;
    if (!this.uplot.data[0].length) return;
    const [min, max] = zooms[this.axis] ?? extent(this.axis);
    this.uplot.setScale("x", { min, max: max > min ? max : min + 1 });
  }

  words(value) {
    if (value === null || value === undefined) return "–";
    if (this.spec.isBytes) return bytes(value);
    return this.spec.percent ? `${Math.round(100 * value)} %` : shortNumber(value);
  }

  // The legend shows the values at the cursor, or the newest ones.
  drawLegend() {
    const at = this.uplot?.cursor.idx;
    const x = at === null || at === undefined ? null : this.uplot.data[0][at];
    const entries = this.curves.filter(({ values }) => values.length).map((curve) => {
      const { label, values, colour, dash } = curve;
      const isShown = !this.hidden.has(label);
      const shown = this.weight ? (curve.smooth ??= smoothed(values, this.weight)) : values;
      const row = x === null ? shown.length - 1 : nearest(curve.x, x);
      const swatch = el("span", { class: `swatch ${colour.slice(2)} ${dash ? "dashed" : ""}` });
      return el("button", { type: "button", "data-key": label, class: "entry", "aria-pressed": String(isShown), onclick: () => this.toggle(label) },
        swatch, el("span", { class: "label" }, label), el("b", {}, this.spec.isHeat ? wordsOf(lastValue(shown, row), x === null ? null : this.uplot.posToVal(this.uplot.cursor.top, "y")) : this.words(lastValue(shown, row))));
    });
    const where = x === null ? "newest" : this.axis === "time" ? new Date(1000 * x).toLocaleTimeString([], { hour12: false }) : this.isRelative ? `${shortNumber(x)} min` : `step ${x}`;
    patch(this.legend, [el("span", { class: "where" }, where), ...entries]);
  }

  toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    this.rebuild();
  }

  rebuild() {
    this.shape = null;
    if (this.curves) this.draw();
  }

  describe(shown) {
    if (this.spec.isHeat) {
      this.plot.setAttribute("aria-label", `${this.spec.title}, ${this.spec.unit}. In the newest step, most are ${wordsOf(lastValue(this.curves[0].values, Infinity))}`);
      return;
    }
    const words = shown.filter(({ values }) => values.length).map(({ label, values }) => {
      const known = values.filter((value) => value !== null && value !== undefined);
      if (!known.length) return `${label}: no values`;
      const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
      return `${label}: ${this.words(known[0])} at first, ${this.words(known.at(-1))} now, from ${this.words(low)} to ${this.words(high)}`;
    });
    this.plot.setAttribute("aria-label", `${this.spec.title}, ${this.spec.unit}. ${words.join("; ") || "nothing is shown"}`);
  }

  onKey(event) {
    const u = this.uplot;
    if (!u || !u.data[0].length) return;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      const last = u.data[0].length - 1;
      const row = Math.min(last, Math.max(0, (u.cursor.idx ?? (step < 0 ? last + 1 : -1)) + step));
      for (const chart of charts[this.axis]) chart.moveTo(u.data[0][row]);
      event.preventDefault();
    } else if (event.key === "Escape" || event.key === "0") {
      zoom(this.axis, null);
    }
  }

  moveTo(x) {
    const u = this.uplot;
    if (!u?.data[0].length) return;
    const left = u.valToPos(u.data[0][nearest(u.data[0], x)], "x");
    // a step outside the zoomed range stands at its edge
    u.setCursor({ left: Math.min(u.over.clientWidth - 1, Math.max(0, left)), top: 8 }, true, false);
  }

  close() {
    this.uplot?.destroy();
    this.uplot = null;
    this.seen.disconnect();
    this.resized.disconnect();
    charts[this.axis].delete(this);
  }
}

// Bring the chart with a metric into view, and mark it; returns whether there is one.
export function showChart(metric) {
  const found = [...charts.step].find(({ spec, curves = [], node }) => !node.hidden && (spec.key === metric || curves.some(({ name }) => name === metric)));
  found?.node.scrollIntoView({ block: "center" });
  found?.plot.focus({ preventScroll: true });
  return Boolean(found);
}

// The first and the last x of all charts of an axis, so that they stand below each other.
function extent(axis) {
  const ends = [...charts[axis]].flatMap(({ curves = [] }) => curves).filter(({ x }) => x.length).map(({ x }) => [x[0], x.at(-1)]);
  return [ends.reduce((low, [first]) => Math.min(low, first), Infinity), ends.reduce((high, [, last]) => Math.max(high, last), -Infinity)];
}

const NO_LINE = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };

function lineSeries(shown, weight, width) {
  const series = [], bands = [];
  for (const { label, colour, dash, band, points } of shown) {
    const stroke = colourOf(colour);
    const look = { label, stroke, width, dash: dash ? [6, 4] : undefined, spanGaps: true, points: { show: points ? true : undefined, size: 6, fill: stroke } };
    if (weight) series.push({ ...look, stroke: faint(stroke, 0.3), width: 1, points: { show: false } });
    series.push(look);
    if (band) {
      const at = series.push(NO_LINE, NO_LINE);
      bands.push({ series: [at, at - 1], fill: faint(stroke, 0.16) });
    }
  }
  return { series, bands };
}

function stackedSeries(shown) {
  const series = [...shown].reverse().map(({ label, colour }) => {
    const stroke = colourOf(colour);
    return { label, stroke, width: 0.5, fill: faint(stroke, 0.55), spanGaps: true, points: { show: false } };
  });
  // each area ends at the one below it, so that colours do not mix
  const bands = series.slice(1).map((below, at) => ({ series: [at + 1, at + 2], fill: series[at].fill }));
  return { series, bands };
}

const clock = (_, values) => values.map((value) => new Date(1000 * value).toLocaleTimeString([], { hour12: false, hour: "2-digit", minute: "2-digit", second: "2-digit" }));

function nearest(x, wanted) {
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (x[middle] <= wanted) low = middle;
    else high = middle - 1;
  }
  return low;
}

function lastValue(values, row) {
  for (let at = Math.min(row, values.length - 1); at >= 0; at--) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

const probe = el("span", { hidden: true });
document.body.append(probe);

// The colour that a custom property has in the theme that is shown, as rgb(…).
export function colourOf(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const faint = (colour, alpha) => colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
