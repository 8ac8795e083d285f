// The frame of the page: headline, navigation, and the view that the address names (#/VIEW/ID?query).
//
// A view is a module of its own that exports an object:
//   open(route, page)    returns what the view shows, an array of nodes or a promise of one;
//                        route = {id, query: URLSearchParams}
//   update(snapshot, hasSteps)  optional: called for each event of the stream while the view is
//                        open; hasSteps: curves by train step have changed
//   close()              optional
// page = {snapshot(): the newest or null, trouble(words), reopen(), watchRuns(names), mayAct()}

import { age, el, number, patch } from "./draw.js";
import { data, watch } from "./data.js";
import { ask, isServed, keepToken, saved } from "./server.js";
import { control } from "../control/control.js";
import { dead } from "../control/dead.js";
import { workers } from "../control/workers.js";
import { rollouts } from "../rollouts/rollouts.js";
import { about } from "../run/about.js";
import { events } from "../run/events.js";
import { logs } from "../run/logs.js";
import { overview } from "../run/overview.js";

const VIEWS = { run: overview, groups: rollouts, workers, dead, control, events, logs, about };
const main = document.getElementById("view");
let opened = null, opening = 0, ofStream = "";

function trouble(words) {
  const line = document.getElementById("trouble");
  if (line.textContent !== words) line.textContent = words;
  line.hidden = !words;
}

// The stream replaces the answer to an action only when it has something else to say.
function streamTrouble(words) {
  if (words !== ofStream) trouble(words);
  ofStream = words;
}

const page = {
  snapshot: () => data.snapshot,
  mayAct: () => data.mayAct,
  trouble,
  reopen: () => open(),
  watchRuns: (names) => watch(names, onEvent, onTrouble),
};

async function open() {
  const asked = location.hash;
  trouble(ofStream);
  const [path, query] = asked.replace(/^#\/?/, "").split("?");
  const [name, id] = path.split("/");
  const view = VIEWS[name] ?? overview;
  for (const link of document.querySelectorAll("nav a")) {
    if (VIEWS[link.getAttribute("href").slice(2)] !== view) link.removeAttribute("aria-current");
    else link.setAttribute("aria-current", "page");
  }
  const mine = ++opening;
  opened?.close?.();
  opened = null;
  let parts;
  try {
    parts = await view.open({ id: id && decodeURIComponent(id), query: new URLSearchParams(query) }, page);
  } catch (error) {
    parts = [el("p", { class: "bad", role: "alert" }, error.message)];
  }
  if (mine !== opening) return;
  main.replaceChildren(...parts.filter(Boolean));
  opened = view;
  if (data.snapshot || saved) view.update?.(data.snapshot, true);
  main.dataset.shown = asked; // for tests: the view is drawn
}

function onEvent(event, hasSteps) {
  streamTrouble(event.trouble || "");
  if (data.snapshot) headline(data.snapshot);
  else if (!saved) return;
  opened?.update?.(data.snapshot, hasSteps);
}

function onTrouble(error) {
  if (error.status === 401) return login(error);
  streamTrouble(error.status ? error.message : `no connection to rolloutmq web: ${error.message}`);
}

function login(error) {
  const form = el("form", { class: "login", onsubmit: (event) => {
    event.preventDefault();
    keepToken(form.elements.token.value.trim());
    start();
  } }, el("p", {}, error.message),
  el("label", {}, "Token ", el("input", { name: "token", type: "password", required: true, autocomplete: "off" })),
  el("button", {}, "Open"));
  opened = null;
  main.replaceChildren(form);
  form.elements.token.focus();
}

const STATES = {
  run: ["running", "good"], drain: ["paused: running groups are finished", "near"],
  abort: ["paused: running groups were returned", "near"], keep: ["paused: running groups are frozen", "near"],
  finished: ["finished", "dim"], stopped: ["stopped: no process of the run is alive", "near"],
};

// What the run does, in words and as a kind of words.
function stateOf(status, findings) {
  const has = (...levels) => findings.some(({ level }) => levels.includes(level));
  if (status.phase !== status.mode) return STATES[status.phase];
  if (status.stuck_on.length) return [el("a", { href: "#/control" }, `waits until you restart task ${status.stuck_on.join(", ")}`), "bad"];
  const stops = has("stuck", "fault");
  // the trainer's own pause around a weight update is short, and a part of running
  if (status.paused_by === "trainer" && !stops) return ["running: weight update", "good"];
  if (status.mode === "run" && stops) return ["running, but it waits", "near"];
  if (status.mode === "run" && has("error")) return ["running, with errors", "bad"];
  if (status.mode === "run" && has("warning")) return ["running, with warnings", "near"];
  const [words, kind] = STATES[status.mode] ?? [status.mode, "near"];
  return [status.paused_by ? `${words}, by the ${status.paused_by}, for ${age(status.mode_age_ms)}` : words, kind];
}

function headline({ status, findings, control: { last_step: last } }) {
  document.getElementById("run").textContent = status.run;
  document.title = `${status.run}: step ${status.steps.taken}`;
  const [words, kind] = stateOf(status, findings);
  const judged = status.judging ? `, ${number(status.judging)} being judged` : "";
  const fact = (label, value, kind = "") => el("span", { class: "fact" }, el("span", { class: "dim" }, label), " ", el("b", { class: kind }, value));
  const role = (state) => (state === "alive" || status.phase === "finished" ? "" : "near");
  patch(document.getElementById("headline"), [
    el("span", { class: `state ${kind}` }, words),
    fact("step", `${number(status.steps.taken)} / ${number(last)}`),
    fact("weights", status.weights.version),
    fact("trainer", status.trainer.state, role(status.trainer.state)),
    fact("producer", status.producer.state, role(status.producer.state)),
    fact("running", number(status.leases) + judged),
    fact("tokens/s", number(status.tokens_per_s)),
    ...(status.cost ? [fact("cost", `${number(status.cost, 2)} ${status.currency}`)] : []),
  ]);
  const account = document.getElementById("account");
  const line = status.adds_up ? "every group is accounted for" : `the account does not add up: ${status.faults.join("; ")}`;
  account.className = status.adds_up ? "good" : "bad";
  if (account.textContent !== line) account.textContent = line; // a status is read aloud when it changes
  document.getElementById("dead-count").textContent = status.dead_letters ? `(${status.dead_letters})` : "";
}

addEventListener("hashchange", () => {
  if (!location.hash.startsWith("#/")) return;
  open();
  main.focus({ preventScroll: true });
});
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  if (document.querySelector("dialog[open]")) return;
  const link = document.querySelector(`nav a[accesskey="${CSS.escape(event.key)}"]`);
  if (link) location.hash = link.getAttribute("href");
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  main.focus();
});

// A report shows curves, samples, dead letters and what is known of the run; nothing of it changes.
function headOfReport({ run, about: { facts }, dead: { total } }) {
  document.title = `${run}: rolloutmq report`;
  document.getElementById("run").textContent = run;
  document.getElementById("headline").textContent = `${facts.state}, step ${facts.steps}, written ${facts.written}`;
  document.getElementById("account").textContent = facts.account ?? "";
  document.getElementById("dead-count").textContent = total ? `(${total})` : "";
  const shown = ["#/run", "#/groups", "#/dead", "#/about", ...(isServed ? ["#/logs"] : [])];
  for (const link of document.querySelectorAll("nav a")) link.hidden = !shown.includes(link.getAttribute("href"));
}

async function start() {
  try {
    const { own } = await ask("runs");
    if (saved) headOfReport(saved);
    page.watchRuns(own ? [own] : []);
  } catch (error) {
    onTrouble(error);
    if (error.status !== 401) setTimeout(start, 2000);
    return;
  }
  open();
}

start();
