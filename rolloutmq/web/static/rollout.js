// One group: the conversation once, its rollouts side by side, tokens coloured by what one wants to see.

import { el, number, panel, table } from "./draw.js";

const COLOURS = {
  version: "policy version of each token", logprob: "how surprising it was",
  mask: "what is trained", advantage: "advantage against its siblings (GRPO)",
};

export function showGroup(told, colour, choose, acts) {
  const records = Object.entries({ ...told.record, trace: told.trace_id }).filter(([name, value]) => value && !["entry", "token"].includes(name));
  const parts = [
    el("p", {}, el("a", { href: "#/groups" }, "← groups")),
    el("h2", {}, told.gid, " ", el("small", {}, told.places.join(" + ") || "lost")),
    told.dead_letter ? el("p", { class: "bad" }, `dead letter: ${told.dead_letter.reason ?? JSON.stringify(told.dead_letter)}`) : null,
    acts,
    el("details", {}, el("summary", {}, "record"), table([["field", (r) => r[0]], ["value", (r) => r[1]]], records)),
  ];
  for (const message of told.messages || []) {
    parts.push(el("div", { class: "dim" }, message.role ?? "?"), el("div", { class: "said" }, text(message.content)));
  }
  if (told.ground_truth !== null && told.ground_truth !== undefined) parts.push(el("p", {}, el("span", { class: "dim" }, "answer key "), text(told.ground_truth)));
  const members = told.members.filter((member) => member.tokens);
  if (!members.length) parts.push(el("p", { class: "dim" }, "nothing was generated yet"));
  else parts.push(colourChoice(colour, choose), key(colour, members), el("div", { class: "siblings" }, members.map((member) => showMember(member, members, colour))));
  return parts.filter(Boolean);
}

function colourChoice(colour, choose) {
  const options = Object.entries(COLOURS).map(([name, words]) => el("option", { value: name, selected: name === colour }, `${name}: ${words}`));
  return el("p", {}, el("label", {}, "colour tokens by ", el("select", { id: "colour", onchange: (event) => choose(event.target.value) }, options)));
}

function key(colour, members) {
  const entries = {
    version: [...new Set(members.flatMap((m) => m.spans.map((s) => s.version)))].sort((a, b) => a - b).map((v) => [`v${v % 6}`, `version ${v}`]).concat([["not-sampled", "not sampled"]]),
    logprob: [["p0", "p < 0.1 %"], ["p1", "p < 5 %"], ["p2", "p < 30 %"], ["p3", "likely"]],
    mask: [["", "trained"], ["masked", "not trained"]],
    advantage: [["plus", "better than its siblings"], ["minus", "worse"]],
  }[colour];
  return el("p", { class: "key", id: "key" }, entries.map(([name, words]) => el("span", { class: name }, words)));
}

function showMember(member, siblings, colour) {
  const score = scoreOf(member), advantage = advantageOf(member, siblings);
  const title = `#${member.index} ${member.status}`;
  const facts = `score ${number(score, 3)} · advantage ${number(advantage, 2)} · ${member.tokens} tokens · ${member.finish_reason ?? "–"}`;
  const named = Boolean(member.token_texts);
  const cells = member.response_ids.map((id, place) => {
    const hint = `token ${id}, version ${versionAt(member, place) ?? "–"}, logprob ${number(member.logprobs[place], 3)}${trained(member, place) ? "" : ", not trained"}`;
    return el("span", { class: classOf(member, place, advantage, colour), title: hint }, named ? member.token_texts[place] : id);
  });
  return panel(title, facts, el("div", { class: `tokens${named ? "" : " ids"}` }, cells),
    named ? null : el("div", { class: "said" }, member.response ?? ""), member.error ? el("p", { class: "bad" }, member.error) : null);
}

const scoreOf = (member) => member.reward?.score ?? null;

function advantageOf(member, siblings) {
  const scores = siblings.map(scoreOf).filter((score) => score !== null);
  if (scoreOf(member) === null || scores.length < 2) return null;
  const mean = scores.reduce((a, b) => a + b, 0) / scores.length;
  const spread = Math.sqrt(scores.reduce((sum, score) => sum + (score - mean) ** 2, 0) / (scores.length - 1));
  return spread ? (scoreOf(member) - mean) / (spread + 1e-6) : 0;
}

const trained = (member, place) => member.response_mask === null || Boolean(member.response_mask[place]);
const versionAt = (member, place) => member.spans.find((span) => span.start <= place && place < span.start + span.length)?.version;

function classOf(member, place, advantage, colour) {
  if (colour === "mask") return trained(member, place) ? "" : "masked";
  if (colour === "advantage") return !trained(member, place) || !advantage ? "" : advantage > 0 ? "plus" : "minus";
  const version = versionAt(member, place);
  if (version === undefined) return "not-sampled";
  if (colour === "version") return `v${version % 6}`;
  const p = Math.exp(member.logprobs[place]);
  return p < 0.001 ? "p0" : p < 0.05 ? "p1" : p < 0.3 ? "p2" : "p3";
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
