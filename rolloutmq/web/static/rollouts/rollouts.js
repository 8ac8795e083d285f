// The rollouts page: groups found by a query, the samples of a step, or the one group that the address names.
//
//   #/groups?outcome=dead&cause=…&text=…&where=JSON&order=-tokens&page=2   what is in the queue now
//   #/groups?step=50     or ?step=newest, ?logged=WORDS, ?why=worst        the sample log
//   #/groups/GID?step=50&view=text&base=0                                  one group, now or as it was logged

import { el } from "../frame/draw.js";
import { ask, saved } from "../frame/server.js";
import { showGroup } from "./group.js";
import { selectNext, setKeys, showHelp } from "./keys.js";
import { queryForm } from "./query_form.js";
import { groupRows, ofQueue, ofSample } from "./rows.js";
import { loadLibraries } from "./said.js";

const GID = /^[\w.-]+-\d{10}$/;
const OUTCOMES = ["completed", "truncated", "aborted", "expired", "filtered", "skipped", "dead"];
const ENDED = ["filtered", "skipped"];
const WHYS = ["best", "worst", "truncated", "random"];
let list = "#/groups", listed = []; // the address to which `u` goes back, and its groups

export function address(gid, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `#/groups${gid ? `/${encodeURIComponent(gid)}` : ""}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

export const groupLink = (gid, step) => el("a", { href: address(gid, { step }) }, gid);

export const rollouts = {
  open: (route, page) => (route.id ? showOneGroup(route.id, route.query, page) : showList(route.query, page)),
  close: () => setKeys({}),
};

async function showList(query, page) {
  list = location.hash || "#/groups";
  listed = [];
  const isLogged = ["step", "logged", "why"].some((name) => query.get(name)) || Boolean(saved);
  const parts = isLogged ? await showSamples(query) : await showQueue(query, page);
  const selected = () => document.querySelector("main .selected");
  setKeys({
    j: () => selectNext(rows(), 1), k: () => selectNext(rows(), -1), "/": () => document.querySelector("input[type=search]").focus(),
    Enter: () => { const link = selected()?.querySelector("a") ?? document.activeElement.closest?.("a"); if (link) location.hash = link.getAttribute("href"); },
    e: () => { const all = selected()?.querySelector("details"); if (all) all.open = !all.open; },
    "[": () => document.getElementById("previous")?.click(), "]": () => document.getElementById("next")?.click(),
  });
  return [sources(isLogged), ...parts];
}

const rows = () => [...document.querySelectorAll("main tbody tr")];
const tab = (words, href, isOpen) => el("a", { href, "aria-current": isOpen ? "page" : null }, words);

function sources(isLogged) {
  return el("div", { class: "sources" }, saved ? null : tab("In the queue", "#/groups", !isLogged), tab("Sample log", "#/groups?step=newest", isLogged), el("button", { type: "button", class: "quiet", onclick: showHelp, "aria-label": "keys" }, "?"));
}

// Links that leave only the groups with one value of `name`. Filtered and skipped groups have no records that a query could match.
function chips(name, values, parameters) {
  const chosen = parameters[name] || "";
  const link = (value) => address("", ENDED.includes(value) ? { [name]: value } : { ...parameters, [name]: value, cause: "" });
  return el("div", { class: "sources chips", role: "group", "aria-label": name }, ["", ...values].map((value) => tab(value || "all", link(value), value === chosen)));
}

const unsorted = (title, field) => el("th", { scope: "col", class: field ? "n" : "" }, title);

function show(entries, heading) {
  if (!entries.length) return null;
  listed = entries.map(({ gid, step }) => ({ gid, step }));
  return el("div", { class: "scroll" }, groupRows(entries, heading, ({ gid, step }) => groupLink(gid, step)));
}

// -- the queue -----------------------------------------------------------------------------

async function showQueue(query, page) {
  const parameters = Object.fromEntries(["text", "where", "order", "outcome", "cause"].map((name) => [name, query.get(name) || ""])), at = Number(query.get("page") || 1);
  const search = (asked) => {
    const gid = [asked.text, asked.where].find((words) => GID.test(words));
    location.hash = gid ? address(gid) : address("", { ...parameters, ...asked });
  };
  const hasEnded = ENDED.includes(parameters.outcome);
  const form = [chips("outcome", OUTCOMES, parameters), hasEnded ? null : queryForm(query, Object.keys(page.snapshot()?.status.tasks ?? {}), search)];
  let found;
  try {
    if (parameters.outcome === "dead") form.splice(1, 0, await causes(parameters));
    found = await ask(`groups?${new URLSearchParams({ ...parameters, page: at })}`);
  } catch (error) {
    return [...form, el("p", { class: "bad", role: "alert" }, error.message)];
  }
  const { groups } = found, goto = (n) => address("", { ...parameters, page: n });
  const pages = el("p", { class: "pages" }, at > 1 ? el("a", { id: "previous", href: goto(at - 1) }, "← previous") : null, ` page ${at} `, found.has_more ? el("a", { id: "next", href: goto(at + 1) }, "next →") : null);
  const notes = [];
  if (found.most_read) notes.push(el("p", { class: "dim" }, `Of the groups that match the query, the first ${found.most_read} are read. `, el("a", { href: address("", parameters.text ? { logged: parameters.text } : { why: parameters.outcome }) }, "Search the sample log")));
  if (!groups.length) notes.push(el("p", {}, "no group matches. Groups that were trained have left the queue: see the ", el("a", { href: "#/groups?step=newest" }, "sample log"), "."));
  return [...form, ...notes, show(groups.map(ofQueue), hasEnded ? unsorted : sorting(parameters)), at > 1 || found.has_more ? pages : null];
}

async function causes(parameters) {
  const found = (await ask("dead")).causes;
  const choose = (event) => { location.hash = address("", { ...parameters, cause: event.target.value }); };
  return el("label", { class: "causes" }, "cause ", el("select", { name: "cause", onchange: choose }, el("option", { value: "" }, "any"),
    found.map(({ cause, count }) => el("option", { value: cause, selected: cause === parameters.cause }, `${count}: ${cause}`))));
}

function sorting(parameters) {
  return (title, field) => {
    if (!field) return el("th", { scope: "col" }, title);
    const isDown = parameters.order === `-${field}`, isUp = parameters.order === field;
    return el("th", { scope: "col", class: "n", "aria-sort": isDown ? "descending" : isUp ? "ascending" : null },
      el("a", { href: address("", { ...parameters, order: isDown ? field : `-${field}` }) }, title, isDown ? " ↓" : isUp ? " ↑" : ""));
  };
}

// -- the sample log ------------------------------------------------------------------------

async function showSamples(query) {
  const text = query.get("logged") || "", why = query.get("why") || "", asked = query.get("step");
  const found = await ask(`samples?${new URLSearchParams(text || why ? { text, why } : asked && asked !== "newest" ? { step: asked } : {})}`);
  if (!found.steps) return [el("p", { class: "dim" }, "The sample log is empty: the trainer writes it after each step, into the run's folder ([samples] groups_per_step).")];
  const parts = [stepForm(found, text), chips("why", WHYS, { why, logged: text, step: text || why ? "" : asked })];
  if (text || why) parts.push(el("p", { class: "dim" }, found.groups.length ? `the newest ${found.groups.length} groups of all steps${text ? " that contain it" : ""}` : "no logged group is like that"));
  else if (!found.groups.length) parts.push(el("p", {}, `no group of step ${found.step} is in the log`));
  return [...parts, show(found.groups.map(ofSample), unsorted)];
}

function stepForm({ steps: [first, last], step }, text) {
  const go = (wanted) => { location.hash = address("", { step: Math.min(Math.max(wanted, first), last) }); };
  const slider = el("input", { type: "range", name: "slider", min: first, max: last, value: step ?? last, "aria-label": "train step", onchange: (event) => go(Number(event.target.value)) });
  const box = el("input", { type: "number", name: "step", min: first, max: last, value: step ?? last, "aria-label": "train step" });
  slider.addEventListener("input", () => { box.value = slider.value; });
  return el("form", { class: "steps", onsubmit: (event) => {
    event.preventDefault();
    const words = event.target.elements.text.value.trim();
    if (words && words !== text) location.hash = address("", { logged: words });
    else go(Number(box.value));
  } },
  el("button", { type: "button", id: "previous", "aria-label": "previous step", onclick: () => go((step ?? last) - 1) }, "◀"), el("label", {}, "step ", box, ` of ${first} to ${last}`), slider, el("button", { type: "button", id: "next", "aria-label": "next step", onclick: () => go((step ?? first) + 1) }, "▶"),
  el("input", { name: "text", type: "search", value: text, "aria-label": "words in the sample log", placeholder: "words, in all steps" }), el("button", {}, "Show"));
}

// -- one group -----------------------------------------------------------------------------

async function showOneGroup(gid, query, page) {
  const step = query.get("step");
  const [group] = await Promise.all([ask(`groups/${encodeURIComponent(gid)}${step ? `?${new URLSearchParams({ step })}` : ""}`), loadLibraries()]);
  const at = listed.findIndex((each) => each.gid === gid && String(each.step ?? "") === (step ?? ""));
  // a neighbour is shown as this one is
  const go = (to) => () => { location.hash = address(to.gid, { step: to.step, view: query.get("view"), colour: query.get("colour") }); };
  const [before, after] = [listed[at - 1], listed[at + 1]].map((to) => (at >= 0 && to ? go(to) : null));
  return showGroup(group, query, page, { list, before, after, words: at >= 0 ? `${at + 1} of ${listed.length}` : "" });
}
