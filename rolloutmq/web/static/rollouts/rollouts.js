// The rollouts page: groups found by a query, the samples of a step, or the one group that the address names.
//
//   #/groups?text=…&where=JSON&order=-tokens&page=2      what is in the queue now
//   #/groups?step=50     or ?step=newest, ?logged=WORDS  the sample log
//   #/groups/GID?step=50&view=text&base=0                one group, now or as it was logged

import { el, number } from "../frame/draw.js";
import { ask, saved } from "../frame/server.js";
import { showGroup } from "./group.js";
import { selectNext, setKeys, showHelp } from "./keys.js";
import { loadLibraries, SPECIAL, visible } from "./said.js";
import { queryForm } from "./query_form.js";

const GID = /^[\w.-]+-\d{10}$/;
let list = "#/groups"; // the address to which `u` goes back

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
  const logged = query.get("step") || query.get("logged") || (saved && "newest");
  const parts = logged ? await showSamples(query) : await showQueue(query, page);
  setKeys({
    j: () => selectNext(rows(), 1), k: () => selectNext(rows(), -1), "/": () => document.querySelector("input[type=search]").focus(),
    Enter: () => { const link = document.querySelector("main .selected a") ?? document.activeElement.closest?.("a"); if (link) location.hash = link.getAttribute("href"); },
    "[": () => document.getElementById("previous")?.click(), "]": () => document.getElementById("next")?.click(),
  });
  return [sources(logged), ...parts];
}

const rows = () => [...document.querySelectorAll("main tbody tr, main .card")];

function sources(logged) {
  const tab = (words, href, isOpen) => el("a", { href, "aria-current": isOpen ? "page" : null }, words);
  return el("div", { class: "sources" }, saved ? null : tab("In the queue", "#/groups", !logged), tab("Sample log", "#/groups?step=newest", Boolean(logged)), el("button", { type: "button", class: "quiet", onclick: showHelp, "aria-label": "keys" }, "?"));
}

async function showQueue(query, page) {
  const parameters = Object.fromEntries(["text", "where", "order"].map((name) => [name, query.get(name) || ""])), at = Number(query.get("page") || 1);
  const search = (asked) => {
    const gid = [asked.text, asked.where].find((words) => GID.test(words));
    location.hash = gid ? address(gid) : address("", asked);
  };
  const form = queryForm(query, Object.keys(page.snapshot()?.status.tasks ?? {}), search);
  let found;
  try {
    found = await ask(`groups?${new URLSearchParams({ ...parameters, page: at })}`);
  } catch (error) {
    return [form, el("p", { class: "bad", role: "alert" }, error.message)];
  }
  const { groups } = found, goto = (n) => address("", { ...parameters, page: n });
  const pages = el("p", { class: "pages" }, at > 1 ? el("a", { id: "previous", href: goto(at - 1) }, "← previous") : null, ` page ${at} `, found.has_more ? el("a", { id: "next", href: goto(at + 1) }, "next →") : null);
  const notes = [];
  if (parameters.text) notes.push(el("p", { class: "dim" }, `Searched are the texts of the first ${found.most_read} groups that match the query. `, el("a", { href: address("", { logged: parameters.text }) }, "Search the sample log")));
  if (!groups.length) notes.push(el("p", {}, "no group matches. Groups that were trained have left the queue: see the ", el("a", { href: "#/groups?step=newest" }, "sample log"), "."));
  return [form, ...notes, groups.length ? sortedTable(groups, parameters) : null, at > 1 || found.has_more ? pages : null];
}

const COLUMNS = [
  ["group", null, (r) => groupLink(r.gid)], ["stage", null, (r) => r.stage], ["status", null, (r) => r.status], ["reward", "reward", (r) => number(r.reward, 3)],
  ["version", "version", (r) => r.version ?? "–"], ["staleness", "staleness", (r) => r.staleness ?? "–"], ["tokens", "tokens", (r) => number(r.tokens)],
  ["tries", "tries", (r) => r.tries], ["held by", null, (r) => r.owner ?? r.batch ?? ""],
];

function sortedTable(groups, parameters) {
  const columns = parameters.text ? [...COLUMNS, ["found", null, (r) => el("span", { class: "excerpt" }, visible(r.excerpt))]] : COLUMNS;
  const heading = ([title, field]) => {
    if (!field) return el("th", { scope: "col" }, title);
    const isDown = parameters.order === `-${field}`, isUp = parameters.order === field;
    return el("th", { scope: "col", class: "n", "aria-sort": isDown ? "descending" : isUp ? "ascending" : null },
      el("a", { href: address("", { ...parameters, order: isDown ? field : `-${field}` }) }, title, isDown ? " ↓" : isUp ? " ↑" : ""));
  };
  const row = (group) => el("tr", {}, columns.map(([, field, show]) => el("td", { class: field ? "n" : "" }, show(group))));
  return el("div", { class: "scroll" }, el("table", { class: "groups" }, el("thead", {}, el("tr", {}, columns.map(heading))), el("tbody", {}, groups.map(row))));
}

// -- the sample log ------------------------------------------------------------------------

async function showSamples(query) {
  const text = query.get("logged") || "", asked = query.get("step");
  const found = await ask(`samples?${new URLSearchParams(text ? { text } : asked && asked !== "newest" ? { step: asked } : {})}`);
  if (!found.steps) return [el("p", { class: "dim" }, "The sample log is empty: it is written by the reference trainer after each step, into the run's folder ([samples] groups_per_step).")];
  const parts = [stepForm(found, text)];
  if (text) parts.push(el("p", { class: "dim" }, found.groups.length ? `${found.groups.length} groups contain it, the newest first` : "no logged group contains it"));
  else if (!found.groups.length) parts.push(el("p", {}, `no group of step ${found.step} is in the log`));
  return [...parts, el("ol", { class: "cards" }, found.groups.map(card))];
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

const scoresOf = (sample) => sample.members.map((member) => member.reward?.score ?? null);
const oneLine = (text) => visible(text).replace(/\s+/g, " ").slice(0, 400);

function card(sample) {
  const scores = scoresOf(sample), known = scores.filter((score) => score !== null), tokens = sample.members.reduce((sum, member) => sum + member.tokens, 0) / sample.members.length;
  const mean = known.length ? known.reduce((a, b) => a + b, 0) / scores.length : null, best = sample.members[scores.indexOf(Math.max(...known))] ?? sample.members[0];
  const asked = sample.messages?.at(-1)?.content ?? sample.prompt ?? "", answer = best.turns?.at(-1).text ?? best.response ?? "";
  const line = (name, text) => el("p", { class: "excerpt", dir: "auto" }, el("span", { class: "dim" }, name, " "), oneLine(text));
  return el("li", { class: "card panel" },
    el("div", { class: "facts" }, el("span", { class: `why ${sample.why}` }, sample.why), el("b", {}, groupLink(sample.gid, sample.step)), el("span", { class: "dots", title: scores.map((score) => number(score, 2)).join(", ") }, scores.map((score) => el("i", { class: score === null ? "" : score > 0 ? "plus" : "minus" }))),
      el("span", { class: "dim" }, `step ${sample.step} · mean score ${number(mean, 3)} · ${number(tokens)} tokens each${sample.staleness === null ? "" : ` · staleness ${sample.staleness}`}`)),
    sample.excerpt ? line("…", sample.excerpt) : [line("prompt", typeof asked === "string" ? asked : JSON.stringify(asked)), line("best", answer.replace(/^[^]*<\/think>/, "").replace(SPECIAL, ""))]);
}

// -- one group -----------------------------------------------------------------------------

async function showOneGroup(gid, query, page) {
  const step = query.get("step");
  const [group] = await Promise.all([ask(`groups/${encodeURIComponent(gid)}${step ? `?${new URLSearchParams({ step })}` : ""}`), loadLibraries()]);
  return showGroup(group, query, page, list);
}
