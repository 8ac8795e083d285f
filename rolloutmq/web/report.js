// Draws the report from the JSON in #data. Texts of rollouts only ever become text nodes.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const SMOOTHED = 10;

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  Object.assign(node, attributes);
  node.append(...children.filter((child) => child !== null));
  return node;
}

const list = (node, facts) => {
  for (const [name, value] of Object.entries(facts)) node.append(el("dt", {}, name), el("dd", {}, String(value)));
};

// {title, unit, lines: [metric, label]}; a chart without any of its metrics is left out
const CHARTS = [
  ["Reward", "score of the batch", [["rewards/mean", "mean"]]],
  ["Solved", "share of groups", [["rewards/solved", "solved"]]],
  ["Loss", "policy loss", [["loss/policy", "policy"]]],
  ["KL divergence", "nats per token", [["policy/kl_ref", "to the reference"], ["policy/kl_old", "to the old policy"], ["mismatch/kl", "trainer to engine"]]],
  ["Entropy", "nats per token", [["policy/entropy", "entropy"]]],
  ["Gradient norm", "before clipping", [["optim/grad_norm", "norm"]]],
  ["Response length", "tokens", [["response_len/mean", "mean"], ["response_len/max", "max"]]],
  ["Staleness", "train steps", [["staleness/mean", "mean"], ["staleness/max", "max"]]],
  ["Seconds of a step", "seconds", [["time/step_s", "whole"], ["time/wait_s", "wait"], ["time/train_s", "train"], ["time/publish_s", "publish"]]],
  ["Throughput", "tokens per second and GPU", [["throughput/rollout_tgs", "rollouts"], ["throughput/effective_tgs", "whole step"]]],
];
const COLOURS = ["#1c5fd0", "#c2410c", "#15803d", "#a21caf"];

const smoothed = (values) => values.map((_, i) => {
  const part = values.slice(Math.max(0, i + 1 - SMOOTHED), i + 1).filter((value) => value !== null);
  return part.length ? part.reduce((sum, value) => sum + value, 0) / part.length : null;
});

function chart(title, unit, lines, x, columns, range) {
  const plot = el("div");
  const figure = el("figure", {}, el("h3", {}, title, " ", el("small", {}, unit)), plot);
  const isSmooth = lines.length === 1 && x.length > 2 * SMOOTHED;
  const series = [{ label: "step" }];
  const rows = [x];
  lines.forEach(([name, label], i) => {
    series.push({ label, stroke: COLOURS[i % 4] + (isSmooth ? "66" : ""), width: isSmooth ? 1 : 1.6, spanGaps: true, points: { show: x.length < 40 } });
    rows.push(columns[name]);
    if (isSmooth) {
      series.push({ label: `mean of ${SMOOTHED}`, stroke: COLOURS[i % 4], width: 2, spanGaps: true, points: { show: false } });
      rows.push(smoothed(columns[name]));
    }
  });
  const ink = getComputedStyle(document.documentElement).getPropertyValue("color");
  const axis = { stroke: ink, grid: { stroke: "#8883", width: 1 }, ticks: { stroke: "#8883" } };
  const draw = new IntersectionObserver(([entry]) => {
    if (!entry.isIntersecting) return;
    draw.disconnect();
    const size = () => ({ width: Math.max(200, plot.clientWidth), height: 220 });
    const drawn = new uPlot({ ...size(), scales: { x: { time: false }, y: range ? { range } : {} }, series, axes: [axis, { ...axis, size: 60 }] }, rows, plot);
    addEventListener("resize", () => drawn.setSize(size()));
  }, { rootMargin: "300px" });
  draw.observe(figure);
  return figure;
}

function drawCurves() {
  const { step, ...columns } = data.curves;
  const used = new Set();
  for (const [title, unit, lines] of CHARTS) {
    const known = lines.filter(([name]) => columns[name]);
    known.forEach(([name]) => used.add(name));
    if (known.length) at("charts").append(chart(title, unit, known, step, columns));
  }
  const tasks = [...new Set(data.evaluations.map(({ task }) => task))];
  if (tasks.length) {
    const steps = [...new Set(data.evaluations.map((each) => each.step))].sort((a, b) => a - b);
    const value = (task, at_) => data.evaluations.find((each) => each.task === task && each.step === at_);
    const table = Object.fromEntries(tasks.map((task) => [task, steps.map((at_) => value(task, at_)?.metrics["eval/accuracy"] ?? null)]));
    at("charts").prepend(chart("Held-out accuracy", "share of rollouts", tasks.map((task) => [task, task]), steps, table, [0, 1]));
  }
  const others = Object.keys(columns).filter((name) => !used.has(name));
  at("others").addEventListener("toggle", () => {
    at("others").lastElementChild.append(...others.map((name) => chart(name, "", [[name, name]], step, columns)));
  }, { once: true });
}

function drawEvaluations() {
  if (!data.evaluations.length) return at("evaluations").append("none");
  const names = [...new Set(data.evaluations.flatMap(({ metrics }) => Object.keys(metrics)))];
  const head = ["task", "step", ...names.map((name) => name.replace("eval/", ""))];
  const rows = data.evaluations.map(({ task, step, metrics }) => [task, step, ...names.map((name) => name in metrics ? +metrics[name].toPrecision(4) : "")]);
  const row = (cells, tag) => el("tr", {}, ...cells.map((cell) => el(tag, {}, String(cell))));
  at("evaluations").append(el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, ...rows.map((cells) => row(cells, "td")))));
}

function drawSamples() {
  if (!data.samples.length) at("samples").append("none: the run has no sample log ([samples] groups_per_step)");
  for (const sample of data.samples) {
    const members = sample.members.map((member) => el("details", {},
      el("summary", {}, `score ${member.score ?? "-"} · ${member.tokens} tokens · ${member.end ?? ""}`), el("pre", {}, member.text)));
    if (members.length) members[0].open = true;
    at("samples").append(el("div", { className: "sample" },
      el("h3", {}, `step ${sample.step} · ${sample.gid} `, el("small", { className: "dim" }, sample.why)),
      el("pre", {}, sample.prompt), sample.truth ? el("p", { className: "dim" }, `expected: ${sample.truth}`) : null, ...members));
  }
}

document.title = `${data.run}: rolloutmq report`;
at("title").textContent = `Run ${data.run}`;
list(at("facts"), data.facts);
list(at("versions"), data.versions);
at("settings").textContent = JSON.stringify(data.settings, null, 2);
drawEvaluations();
drawCurves();
drawSamples();
