// The workers of the run: now, and since they registered.

import { age, el, number, patch, table } from "../frame/draw.js";
import { data } from "../frame/data.js";
import { ask } from "../frame/server.js";
import { Chart } from "../run/chart.js";
import { act } from "./acts.js";

const places = { now: el("div"), one: el("div") };
let thePage = null, one = null, rate = null;

export const workers = {
  async open(route, page) {
    thePage = page;
    one = route.id ?? null;
    patch(places.now, []);
    places.one.replaceChildren(...(one ? [await history(one)] : []));
    return [places.now, places.one];
  },
  close() {
    rate?.close();
    rate = null;
  },
  update({ status, worker_numbers: rows }) {
    const found = status.workers.length ? status.workers : status.ended_workers;
    patch(places.now, [...found.filter((w) => w.barred_for_ms !== null).map(reasonBarred), found.length ? table(columns(status, rows), found) : el("p", { class: "near" }, "No worker has registered: `rolloutmq worker CONFIG` starts one, which joins once its engine is loaded.")]);
    const worker = found.find(({ id }) => id === one);
    if (!one) return;
    if (worker) patch(document.getElementById("worker-now"), [details(worker, rows)]);
    const values = data.live.columns[`worker_tokens_per_s/${one}`];
    rate.node.hidden = !values; // a worker that has left has none
    if (values) rate.show([{ label: one, x: data.live.x, values, colour: "--s0" }], 0, false);
  },
};

const inTable = ([, { table }]) => table === "workers";

function columns(status, rows) {
  const newest = `${status.weights.lineage}:${status.weights.version}`;
  const kind = { idle: "dim", paused: "near", draining: "near", starting: "near" };
  return [
    ["worker", (w) => el("a", { href: `#/workers/${encodeURIComponent(w.id)}` }, w.id)], ["engine", (w) => w.engine],
    ["state", (w) => el("span", { class: w.barred_for_ms !== null ? "bad" : kind[w.state] ?? "" }, w.barred_for_ms !== null ? "barred" : w.state)],
    ["weights", (w) => el("span", { class: w.weights === newest ? "" : "near" }, w.weights || "–")],
    ["heartbeat", (w) => ago(w.silent_ms), true], ["registered", (w) => ago(w.registered_ms), true],
    ["holds", (w) => `${w.holds}${w.concurrency ? ` / ${w.concurrency}` : ""}`, true],
    ...Object.entries(rows).filter(inTable).map(([name, { heading }]) => [heading, (w) => number(w[name]), true]),
    ["per hour", (w) => number(perHour(w)), true], ["failed", (w) => el("span", { class: w.failed ? "near" : "dim" }, number(w.failed)), true],
  ];
}

function reasonBarred(w) {
  return el("p", { class: "bad" }, `${w.id} is barred: the trainer cannot use ${number(w.bad_groups)} of its groups. See `, el("a", { href: "#/dead" }, "dead letters"), ".");
}

const ago = (ms) => (ms === null ? "–" : `${age(ms)} ago`);
const workedMs = (w) => w.registered_ms - (w.alive ? 0 : w.silent_ms);
const perHour = (w) => (w.registered_ms !== null && workedMs(w) > 0 ? (3_600_000 * w.done) / workedMs(w) : null);

function details(w, rows) {
  const tries = w.done + w.failed;
  const facts = [
    ["Groups", `${number(w.done)} done, ${number(w.failed)} failed${tries ? ` (${number((100 * w.failed) / tries, 1)} %)` : ""}, ${number(w.quarantined)} refused by the trainer`],
    ["Engine", w.engine],
    ...Object.entries(rows).filter((row) => !inTable(row)).map(([name, { heading, note }]) => [heading, `${number(w[name])}${note && w[name] ? `: ${note.replace("{}", number(w[name]))}` : ""}`]),
    w.refusal && ["Refused weights", w.refusal],
    ...Object.entries(w.facts).map(([name, value]) => [name, value]),
  ].filter(Boolean);
  const list = el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  const barred = w.barred_for_ms !== null && thePage.mayAct() ? act(`workers/${encodeURIComponent(w.id)}/admit`, "Let it claim again…", thePage, {
    title: `Let ${w.id} claim again?`, text: `It was barred ${age(w.barred_for_ms)} ago for ${number(w.bad_groups)} groups that the trainer cannot use. Its dead letters give the reason.`, yes: "Let it claim" }) : null;
  return el("div", {}, list, barred);
}

async function history(id) {
  const events = await ask(`workers/${encodeURIComponent(id)}/events`);
  const said = ({ at_ms, event, worker, ...fields }) => Object.entries(fields).map(([name, value]) => `${name}=${value}`).join(" ");
  const rows = [["when", (e) => new Date(e.at_ms).toLocaleTimeString([], { hour12: false })], ["event", (e) => e.event], ["", said, "text"]];
  rate = new Chart({ key: "worker", title: "Tokens per second", unit: "of this worker" }, "time");
  rate.show([], 0, false); // hidden until there are values
  return el("section", { class: "panel worker" }, el("h2", {}, `Worker ${id}`), el("div", { id: "worker-now" }), rate.node,
    el("h3", {}, "Its newest events"), events.length ? table(rows, events) : el("p", { class: "dim" }, "none is kept"));
}
