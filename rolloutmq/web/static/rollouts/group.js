// One group: its conversation once, its rollouts side by side, and what distinguishes them.

import { el, number, table } from "../frame/draw.js";
import { groupActs } from "../control/acts.js";
import { differences } from "./differences.js";
import { selectNext, setKeys, showHelp } from "./keys.js";
import { asText, folded, plain, readable, response, showMessage, SPECIAL, visible } from "./said.js";
import { coloursOf, key, tokenCells, versionsOf } from "./tokens.js";

const VIEWS = { rendered: "rendered", text: "text", tokens: "tokens", changes: "differences" };
const RECORD_NOISE = ["entry", "token", "payload", "crc"];

// way: {list: where `u` leads, before, after: what opens the neighbours in it, words}
export function showGroup(group, query, page, way) {
  const members = group.members.filter((member) => member.tokens);
  const hasTokens = members.some((member) => member.response_ids);
  const state = { view: query.get("view") || "rendered", colour: query.get("colour") || "version", base: Number(query.get("base") || 0) };
  const root = el("div", { class: "group" });
  const change = (changes) => {
    Object.assign(state, changes);
    for (const [name, value] of Object.entries(changes)) query.set(name, value);
    // the address carries the state; the group is not asked for again
    history.replaceState(null, "", `#/groups/${encodeURIComponent(group.gid)}?${query}`);
    draw();
  };
  const draw = () => root.replaceChildren(...body(group, members, state, change, hasTokens));
  draw();
  const views = Object.keys(VIEWS).filter((name) => hasTokens || name !== "tokens"), panels = () => [...root.querySelectorAll(".member")];
  const selected = () => Number(root.querySelector(".member.selected")?.dataset.place ?? state.base);
  setKeys({ j: () => selectNext(panels(), 1), k: () => selectNext(panels(), -1), u: () => { location.hash = way.list; }, "[": () => way.before?.(), "]": () => way.after?.(), v: () => change({ view: views[(views.indexOf(state.view) + 1) % views.length] }),
    d: () => change(state.view === "changes" ? { view: "rendered" } : { view: "changes", base: selected() }), "/": () => { location.hash = way.list; } });
  return [heading(group, page, way), root];
}

function heading(group, page, way) {
  const place = group.sampled ? `step ${group.sampled.step}, ${group.sampled.why}, from the sample log` : group.places.join(" + ") || "lost";
  const records = Object.entries({ ...group.record, trace: group.trace_id }).filter(([name, value]) => value && !RECORD_NOISE.includes(name));
  return el("div", { class: "group-head" },
    el("p", { class: "back" }, el("a", { href: way.list }, "← back"), neighbour("previous", "‹", way.before), way.words ? el("span", { class: "dim" }, way.words) : null, neighbour("next", "›", way.after), el("button", { type: "button", class: "quiet", onclick: showHelp, "aria-label": "keys" }, "?")),
    el("h2", {}, group.gid, " ", el("small", {}, place)),
    group.dead_letter ? el("pre", { class: "bad trace" }, `dead letter: ${visible(asText(group.dead_letter.reason ?? group.dead_letter))}`) : null,
    group.gone ? el("p", { class: "dim" }, group.gone, group.sampled ? "; this is what the sample log holds of it" : ". The sample log has it only if it was chosen: ", group.sampled ? null : el("a", { href: "#/groups?step=newest" }, "sample log")) : null,
    page.snapshot() ? el("p", {}, el("a", { href: `#/logs?${new URLSearchParams({ about: group.gid })}` }, "its lines in the logs")) : null,
    groupActs(group.gid, group.may, page),
    el("details", { class: "record" }, el("summary", {}, "record"), table([["field", (r) => r[0]], ["value", (r) => visible(asText(r[1]))]], records)));
}

const neighbour = (name, sign, open) => (open ? el("button", { type: "button", id: name, "aria-label": `${name} group of the list`, onclick: open }, sign) : null);

function body(group, members, state, change, hasTokens) {
  const isRendered = state.view !== "text", prompt = [readable(group.messages ?? [], (messages) => messages.map((message) => showMessage(message, isRendered)))].flat();
  if (!prompt.length && group.prompt) prompt.push(plain(group.prompt));
  const truth = group.ground_truth === null || group.ground_truth === undefined ? null
    : el("div", { class: "truth" }, el("span", { class: "dim" }, "ground truth "), visible(asText(group.ground_truth)).slice(0, 2000));
  if (!members.length) return [...prompt, truth, group.gone ? null : el("p", { class: "dim" }, "nothing has been generated yet")].filter(Boolean);
  return [...prompt, truth, siblings(members, state, change), controls(members, state, change, hasTokens),
    el("div", { class: `siblings view-${state.view}` }, inOrder(members, state).map((member) => readable(member, () => showMember(member, members, state))))].filter(Boolean);
}

// In comparisons, what the others are compared with is the first. Members are told apart by their place: an index may have several.
const inOrder = (members, state) => (state.view === "changes" ? [...members].sort((a, b) => (b === members[state.base]) - (a === members[state.base])) : members);

// Scores and facts of all rollouts in one table; a row leads to its rollout.
function siblings(members, state, change) {
  const names = [...new Set(members.flatMap((member) => Object.keys(member.reward ?? {})))].sort((a, b) => (b === "score") - (a === "score"));
  const columns = [
    ["", (m) => el("button", { type: "button", class: "quiet", onclick: () => document.getElementById(`member-${members.indexOf(m)}`).scrollIntoView({ behavior: "smooth", block: "start" }) }, nameOf(m))],
    ...names.map((name) => [visible(name), (m) => number(m.reward?.[name] ?? null, 3), true]),
    ["advantage", (m) => signed(advantageOf(m, members)), true], ["tokens", (m) => number(m.tokens), true], ["finish", (m) => el("span", { class: m.finish_reason === "length" ? "near" : "" }, visible(m.finish_reason ?? "–"))], ["status", (m) => m.status], ["weights", (m) => versionsOf(m), true],
    ["response", (m) => el("span", { class: "first-line" }, visible(textOf(m).trimStart().slice(0, 160)))],
    ["", (m) => el("button", { type: "button", class: "quiet", "aria-pressed": String(state.view === "changes" && m === members[state.base]), onclick: () => change({ view: "changes", base: members.indexOf(m) }) }, "compare")],
  ];
  return el("details", { class: "scores", open: matchMedia("(min-width: 40rem)").matches }, el("summary", { class: "dim" }, "all rollouts"), table(columns, members));
}

function controls(members, state, change, hasTokens) {
  const views = Object.entries(VIEWS).filter(([name]) => (hasTokens || name !== "tokens") && (members.length > 1 || name !== "changes"));
  const choice = el("div", { class: "views", role: "group", "aria-label": "how responses are shown" }, views.map(([name, words]) => el("button", { type: "button", "aria-pressed": String(state.view === name), onclick: () => change({ view: name }) }, words)));
  if (state.view === "changes") return el("div", { class: "controls" }, choice, el("label", {}, "from ", el("select", { id: "base", onchange: (event) => change({ base: Number(event.target.value) }) }, members.map((m, place) => el("option", { value: place, selected: place === state.base }, nameOf(m))))), el("span", { class: "key" }, el("ins", {}, "added"), " ", el("del", {}, "missing")));
  if (state.view !== "tokens") return el("div", { class: "controls" }, choice);
  const options = coloursOf(members).map(([name, words]) => el("option", { value: name, selected: name === state.colour }, `${name}: ${words}`));
  return el("div", { class: "controls" }, choice, el("label", {}, "colour by ", el("select", { id: "colour", onchange: (event) => change({ colour: event.target.value }) }, options)), key(state.colour, members));
}

function showMember(member, members, state) {
  const advantage = advantageOf(member, members), score = member.reward?.score ?? null;
  const title = el("h3", { tabindex: "-1" }, `${nameOf(member)} `, el("span", { class: `score ${score === null ? "" : score > 0 ? "plus" : "minus"}` }, number(score, 3)),
    el("small", {}, ` ${signed(advantage)} · ${number(member.tokens)} tokens · ${visible(member.finish_reason ?? "–")}`, member.status === "completed" ? "" : ` · ${member.status}`));
  return el("section", { class: "panel member", id: `member-${members.indexOf(member)}`, "data-place": members.indexOf(member) }, title,
    (member.messages || []).map((message) => showMessage(message, state.view !== "text")), content(member, members, advantage, state),
    member.feedback ? folded("the judge says", asText(member.feedback)) : null,
    member.error ? el("pre", { class: "bad trace" }, visible(member.error)) : null);
}

function content(member, members, advantage, state) {
  if (state.view === "tokens" && member.response_ids) return [...tokenCells(member, advantage, state.colour), member.token_texts ? null : plain(member.response ?? "")];
  if (state.view === "text") return plain(textOf(member));
  const base = members[state.base] ?? members[0];
  if (state.view === "changes") return base === member ? plain(textOf(member)) : textOf(base) === textOf(member) ? el("p", { class: "dim" }, `the same text as ${nameOf(base)}`) : differences(textOf(base), textOf(member));
  return [...(member.turns ? member.turns.flatMap(showTurn) : response(member.response ?? "")), ...(member.turns ? [] : (member.tool_calls ?? []).map((call) => folded(`tool call ${call.name}`, call.raw_arguments || asText(call.arguments))))];
}

const showTurn = (turn) => (turn.trained ? response(turn.text.replace(SPECIAL, "")) : [folded("not sampled: tool result, or what the environment said", turn.text)]);
const textOf = (member) => (member.turns ? member.turns.map((turn) => turn.text).join("") : member.response ?? "");
const signed = (value) => (value === null ? "–" : `${value > 0 ? "+" : ""}${number(value, 2)}`);

const nameOf = (member) => `#${member.index} ${visible(member.role ?? "")}`.trimEnd();

// Compared with the rollouts of the same role.
function advantageOf(member, members) {
  const scores = members.filter((other) => other.role === member.role).map((other) => other.reward?.score ?? null).filter((score) => score !== null), own = member.reward?.score ?? null;
  if (own === null || scores.length < 2) return null;
  const mean = scores.reduce((a, b) => a + b, 0) / scores.length;
  const spread = Math.sqrt(scores.reduce((sum, score) => sum + (score - mean) ** 2, 0) / (scores.length - 1));
  return spread ? (own - mean) / (spread + 1e-6) : 0;
}
