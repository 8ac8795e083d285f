// The run at one glance: what stops it, curves by train step (of several runs, if wanted), what
// happens now, and the groups of each task.

import { bar, bars, bytes, el, number, panel, patch, table } from "../frame/draw.js";
import { data } from "../frame/data.js";
import { ask, saved } from "../frame/server.js";
import { band, bySize } from "./curves.js";
import { Chart, onZoom, showChart, zoom, zoomOf } from "./chart.js";
import { BY_STEP, BY_TIME, linesOf, otherCharts, valuesOf } from "./chart_list.js";
import { findings, hasCause } from "./findings.js";
import { PANELS, Panel } from "./panels.js";

const STAGES = ["waiting", "running", "completed", "aborted", "expired", "taken", "archived", "filtered", "dropped", "skipped", "dead"];
const COLOURS = ["--s0", "--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7"];
const LEVELS = { warning: "near", error: "bad" };
const choice = { runs: null, own: null, all: [], tags: {}, smoothing: 0, x: "step", task: "" };
const detail = new Map(); // run -> its steps in the zoomed range, where all steps are thinned out
let charts = [], others = [], places = null, thePage = null, panels = [], wanted = null;

export const overview = {
  async open(route, page) {
    const { own, runs, tags = {} } = await ask("runs");
    thePage = page;
    choice.own = own;
    choice.all = runs;
    choice.tags = tags;
    wanted = route.query.get("chart");
    choice.runs ??= own ? [own] : [];
    places = {
      findings: el("div"), runs: el("div", { class: "runs" }), differences: el("div", { class: "differences" }), steps: el("div", { class: "charts" }), noSteps: el("p", { class: "dim" }),
      time: el("div", { class: "charts" }), tasks: el("div", { class: "panels" }), others: el("div", { class: "charts" }),
    };
    charts = [...BY_STEP.map((spec) => new Chart(spec, "step")), ...BY_TIME.map((spec) => new Chart(spec, "time", spec.key === "stages" ? ["taken"] : []))];
    places.steps.append(...charts.filter(({ axis }) => axis === "step").map(({ node }) => node));
    places.time.append(...charts.filter(({ axis }) => axis === "time").map(({ node }) => node));
    onZoom.add(readDetail);
    addEventListener("themechange", redraw);
    addEventListener("click", closeMenu);
    panels = PANELS.map((shown) => new Panel(shown));
    places.more = el("details", { class: "more", ontoggle: () => drawOthers() }, el("summary", {}, "All other metrics"), places.others);
    drawDifferences();
    return [places.findings, heading("Training", toolbar(page)), places.runs, places.differences, places.noSteps, places.steps, places.more,
      ...(saved ? [] : [heading("Now", taskChoice()), places.time]), el("div", { class: "stack more" }, panels.map(({ node }) => node)), ...(saved ? [] : [heading("Groups"), places.tasks])];
  },
  update(snapshot, hasSteps) {
    if (saved?.findings.length) patch(places.findings, findings(saved));
    if (snapshot) {
      patch(places.findings, findings(snapshot));
      drawTasks(snapshot);
      places.time.hidden = snapshot.status.mode === "finish"; // nothing changes any more
      drawTime();
    }
    for (const panel of panels) panel.update(snapshot);
    if (hasSteps) drawSteps();
  },
  close() {
    for (const chart of allCharts()) chart.close();
    charts = [];
    others = [];
    onZoom.delete(readDetail);
    removeEventListener("themechange", redraw);
    removeEventListener("click", closeMenu);
  },
};

const heading = (words, ...tools) => el("div", { class: "heading" }, el("h2", {}, words), ...tools);

function toolbar(page) {
  const shown = el("output", {}, "off");
  const slider = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(choice.smoothing), "aria-label": "Smoothing", oninput: () => {
    choice.smoothing = Number(slider.value);
    shown.textContent = choice.smoothing ? choice.smoothing.toFixed(2) : "off";
    drawSteps();
  } });
  const axis = el("select", { "aria-label": "Horizontal axis", onchange: () => { choice.x = axis.value; zoom("step", null); drawSteps(); } },
    el("option", { value: "step" }, "train step"), el("option", { value: "minutes" }, "minutes since the start"));
  axis.value = choice.x;
  const compare = choice.all.length > 1 ? el("details", { class: "menu", onkeydown: (event) => { if (event.key === "Escape") compare.open = false; } }, el("summary", {}, "Compare runs"), el("div", { class: "sheet" },
    choice.all.map((name) => el("label", {}, el("input", { type: "checkbox", checked: choice.runs.includes(name), onchange: (event) => {
      choice.runs = choice.all.filter((each) => (each === name ? event.target.checked : choice.runs.includes(each)));
      page.watchRuns(choice.runs);
      drawSteps();
      drawDifferences();
    } }), ` ${name} `, (choice.tags[name] ?? []).map((tag) => el("span", { class: "tag" }, tag)))))) : null;
  const reset = el("button", { type: "button", id: "reset-zoom", hidden: true, onclick: () => { zoom("step", null); zoom("time", null); } }, "Show all");
  return el("div", { class: "tools" }, compare, el("label", {}, "smoothing ", slider, " ", shown), el("label", {}, "by ", axis), reset);
}

function taskChoice() {
  const tasks = Object.keys(data.snapshot?.status.tasks ?? {});
  if (tasks.length < 2) return null;
  const select = el("select", { "aria-label": "Task", onchange: () => { choice.task = select.value; drawTime(); } },
    el("option", { value: "" }, "all tasks"), tasks.map((name) => el("option", { value: name }, name)));
  select.value = choice.task;
  return el("div", { class: "tools" }, el("label", {}, "groups of ", select));
}

function closeMenu({ target }) {
  const menu = document.querySelector(".menu[open]");
  if (menu && !menu.contains(target)) menu.open = false;
}

function redraw() {
  for (const chart of allCharts()) chart.rebuild();
}

// Show curves in a chart; those of another order of magnitude in charts beside it.
function show(chart, curves, ...how) {
  const [largest = [], ...smaller] = chart.spec.stacked || chart.spec.isHeat ? [curves] : bySize(curves);
  chart.show(largest, ...how);
  chart.beside ??= [];
  while (chart.beside.length < smaller.length) {
    const more = new Chart({ ...chart.spec, key: `${chart.spec.key}-${chart.beside.length + 2}` }, chart.axis);
    (chart.beside.at(-1) ?? chart).node.after(more.node);
    chart.beside.push(more);
  }
  chart.beside.forEach((each, at) => each.show(smaller[at] ?? [], ...how));
}

const allCharts = () => [...charts, ...others].flatMap((chart) => [chart, ...(chart.beside ?? [])]);

// -- curves by train step ----------------------------------------------------------------------

function tableOf(run, spec) {
  const kept = data.runs.get(run);
  if (!kept) return null;
  const table = spec.table === "evaluations" ? kept.evaluations : spec.isHeat ? kept.histograms : detail.get(run) ?? kept.steps;
  if (!table?.x?.length) return null;
  return choice.x === "step" ? table : byMinutes(table, kept.steps);
}

// The same table by minutes since the first step of its run; evaluations have the time of their step.
function byMinutes(table, steps) {
  const begin = steps.ended_s.find((at) => at !== null);
  if (begin === undefined) return null;
  const ended = new Map(steps.x.map((step, row) => [step, steps.ended_s[row]]));
  const x = table.x.map((step) => (ended.get(step) ?? begin) - begin).map((seconds) => seconds / 60);
  return { x, columns: table.columns };
}

function curvesOf(spec) {
  const runs = spec.stacked || spec.isHeat ? choice.runs.slice(0, 1) : choice.runs;
  const many = runs.length > 1;
  return runs.flatMap((run) => {
    const table = tableOf(run, spec);
    if (!table) return [];
    const lines = linesOf(spec, table.columns).map((wanted, at) => ({ wanted, place: at, values: valuesOf(spec, wanted, table.columns) })).filter(({ values }) => values);
    return lines.map(({ wanted, values, place }, at) => {
      return {
        name: wanted.name, label: many ? (lines.length > 1 ? `${run}: ${wanted.label}` : run) : wanted.label,
        x: table.x, values, colour: COLOURS[(many ? colourPlace(run) : place) % COLOURS.length], dash: many && at > 0,
        band: wanted.band && choice.smoothing === 0 && runs.length < 3 ? band(table.columns, wanted.name, wanted.band) : null,
        points: spec.table === "evaluations",
      };
    });
  });
}

const colourPlace = (run) => choice.all.indexOf(run);

function drawSteps() {
  const has = choice.runs.some((run) => data.runs.get(run)?.steps.x.length);
  places.noSteps.hidden = has;
  places.noSteps.textContent = choice.own
    ? "No step has been trained yet: curves begin with the first one."
    : "The folder of this run is not known here, so its curves are not: start `rolloutmq web` with --run-dir.";
  for (const chart of charts) if (chart.axis === "step") show(chart, curvesOf(chart.spec), choice.smoothing, choice.x !== "step");
  drawOthers();
  patch(places.runs, choice.runs.length > 1 ? choice.runs.map(runKey) : []);
  if (wanted && has) { // a finding says to look at it
    places.more.open ||= !showChart(wanted);
    drawOthers();
    showChart(wanted);
    wanted = null;
  }
}

// The keys of the configs that differ between the compared runs.
async function drawDifferences() {
  const runs = choice.runs.length > 1 ? choice.runs : [], into = places.differences;
  const found = runs.length ? await ask(`differences?${new URLSearchParams({ runs: runs.join(",") })}`).catch((error) => thePage.trouble(error.message)) : null;
  if (runs.length && runs !== choice.runs) return; // the choice has changed meanwhile
  const shown = (value) => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  patch(into, found?.length ? [el("details", { class: "panel", open: true }, el("summary", {}, `Configs differ in ${found.length} ${found.length === 1 ? "key" : "keys"}`),
    table([["key", ([name]) => el("code", {}, name), "text"], ...runs.map((run, at) => [run, ([, values]) => shown(values[at]), "text"])], found))] : []);
}

function runKey(run) {
  const swatch = el("span", { class: `swatch ${COLOURS[colourPlace(run) % COLOURS.length].slice(2)}` });
  const steps = data.runs.get(run)?.steps.x;
  return el("span", { "data-key": run, class: "entry" }, swatch, run, el("span", { class: "dim" }, ` step ${steps?.at(-1) ?? "–"}`));
}

function drawOthers() {
  if (!places.more.open) return;
  const all = (table) => Object.assign({}, ...choice.runs.map((run) => data.runs.get(run)?.[table].columns ?? {}));
  for (const spec of otherCharts(all("steps"), all("evaluations"))) {
    if (others.some((chart) => chart.spec.key === spec.key)) continue;
    const chart = new Chart(spec, "step");
    others.push(chart);
    places.others.append(chart.node);
  }
  for (const chart of others) show(chart, curvesOf(chart.spec), choice.smoothing, choice.x !== "step");
}

// Where a long run was thinned out, read the zoomed steps in detail.
async function readDetail(axis, range) {
  document.getElementById("reset-zoom").hidden = !zoomOf("step") && !zoomOf("time");
  if (axis !== "step") return;
  detail.clear();
  if (range && choice.x === "step") {
    const [first, last] = [Math.max(1, Math.floor(range[0])), Math.max(1, Math.ceil(range[1]))];
    for (const run of choice.runs.filter((name) => data.runs.get(name)?.thinned)) {
      try {
        detail.set(run, (await ask(`steps?${new URLSearchParams({ run, first, last })}`)).steps);
      } catch (error) {
        thePage.trouble(error.message); // the curves of all steps stay
      }
    }
  }
  drawSteps();
}

// -- what happens now --------------------------------------------------------------------------

function drawTime() {
  for (const chart of charts) {
    if (chart.axis !== "time") continue;
    const { x, columns } = data.live;
    show(chart, linesOf(chart.spec, columns, choice.task).map((wanted, at) => {
      const values = valuesOf(chart.spec, wanted, columns);
      return values && { label: wanted.label, x, values, colour: COLOURS[at % COLOURS.length], dash: false, band: null };
    }).filter(Boolean), 0, false);
  }
}

function drawTasks({ status, notes, findings: found }) {
  const tasks = Object.entries(status.tasks);
  const count = (n) => el("span", { class: n ? "" : "dim" }, number(n));
  const columns = [["stage", (row) => row], ...tasks.map(([name, task]) => [name, (row) => count(task.places[row]), true])];
  const groups = panel("Groups by stage", null, table(columns, STAGES));
  groups.classList.add(tasks.length > 3 ? "wide" : "tall");
  // a task that has not begun, and stops nothing, has its column in the table alone
  const begun = tasks.filter(([name, task]) => task.in_flight || task.trouble || notes.tasks[name].length || Object.keys(task.shares).length);
  patch(places.tasks, [groups, ...begun.map(([name, task]) => panelOf(name, task, notes.tasks[name], found)), memory(status, notes.run.filter(({ text }) => !(/^dead letters/.test(text) && found.some(({ name }) => name === "task/dead_letters"))))]);
}

function panelOf(name, task, notes, known) {
  const ages = Object.entries(task.staleness).filter(([, n]) => n), most = Math.max(1, ...ages.map(([, n]) => n));
  const failed = task.places.dead ? `, without ${task.places.dead} that failed` : "";
  return panel(name, `mean score ${number(task.mean_reward, 3)}${failed}`,
    bars(bar("ahead", task.in_flight, task.in_flight_limit || task.in_flight, `${task.in_flight} / ${task.in_flight_limit}`, task.in_flight_limit && task.in_flight >= task.in_flight_limit ? "near" : ""),
      ages.map(([staleness, n]) => bar(`staleness ${staleness}`, n, most, number(n))),
      Object.entries(task.shares).map(([name, { share, level }]) => bar(name, share, 1, `${number(100 * share)} %`, LEVELS[level]))),
    ...notes.map(({ text, level }) => el("p", { class: LEVELS[level] ?? "dim" }, text)),
    task.trouble && !hasCause(known, task.trouble) ? el("p", { class: "bad" }, task.trouble) : null);
}

function memory({ memory: { held_bytes, low_bytes, high_bytes } }, notes) {
  const said = notes.map(({ text, level }) => el("p", { class: LEVELS[level] ?? "dim" }, text));
  return panel("Memory", null, ...said, ...(high_bytes
    ? [bars(bar("payloads", held_bytes, high_bytes, bytes(held_bytes))), el("p", { class: "dim" }, `new prompts wait above ${bytes(low_bytes)}`)]
    : [el("p", {}, `payloads hold ${bytes(held_bytes)}`), el("p", { class: "dim" }, "no limit is set")]));
}
