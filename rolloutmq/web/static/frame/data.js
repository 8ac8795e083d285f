// What the stream has sent so far: the newest snapshot, live numbers over time, and the curves of
// the chosen runs by train step. Views read it and are told when it changes.

import { follow } from "./server.js";

const MOST_LIVE = 2400;
const emptyTable = () => ({ x: [], columns: {} });

export const data = {
  snapshot: null,
  mayAct: false,
  live: emptyTable(),
  runs: new Map(), // name -> {steps: {x, ended_s, columns}, evaluations: {x, columns}, thinned}
};

let stream = new AbortController();

// Follow the run, and the curves of the named runs; the stream before this one ends.
export function watch(names, onEvent, onTrouble) {
  stream.abort();
  stream = new AbortController();
  const { signal } = stream;
  let isFirst = true;
  const restart = (error) => { isFirst = true; onTrouble(error); };
  const take = (event) => {
    if (signal.aborted) return;
    if (isFirst) { data.live = emptyTable(); data.runs = new Map(names.map((name) => [name, noCurves()])); }
    isFirst = false;
    onEvent(event, keep(event));
  };
  follow(new URLSearchParams({ runs: names.join(",") }), signal, take, restart);
}

const noCurves = () => ({ steps: { ...emptyTable(), ended_s: [] }, histograms: emptyTable(), evaluations: emptyTable(), thinned: false });

// Keep an event; returns whether curves by train step have changed.
function keep(event) {
  if (event.status) data.snapshot = event;
  data.mayAct = event.may_act;
  append(data.live, event.live);
  if (data.live.x.length > MOST_LIVE) halve(data.live);
  for (const [name, added] of Object.entries(event.series)) {
    const run = data.runs.get(name) ?? noCurves();
    if (added.whole) Object.assign(run, { steps: { ...emptyTable(), ended_s: [] }, histograms: emptyTable(), thinned: added.thinned });
    if (added.steps) append(run.steps, added.steps);
    if (added.histograms) append(run.histograms, added.histograms);
    if (added.evaluations) run.evaluations = added.evaluations;
    data.runs.set(name, run);
  }
  return Object.keys(event.series).length > 0;
}

function append(table, added) {
  const before = table.x.length;
  table.x.push(...added.x);
  if (added.ended_s) table.ended_s.push(...added.ended_s);
  for (const [name, values] of Object.entries(added.columns)) {
    table.columns[name] ??= new Array(before).fill(null);
    table.columns[name].push(...values);
  }
  for (const values of Object.values(table.columns)) while (values.length < table.x.length) values.push(null);
}

function halve(table) {
  const half = (values) => values.filter((_, row) => row % 2 === 0 || row === values.length - 1);
  table.x = half(table.x);
  for (const name of Object.keys(table.columns)) table.columns[name] = half(table.columns[name]);
}
