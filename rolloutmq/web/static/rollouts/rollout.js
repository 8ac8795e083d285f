// One group: its conversation once, its rollouts side by side, and their tokens in the chosen colours.

import { el, number, panel, table } from "../frame/draw.js";

const COLOURS = {
  version: "policy version of each token", logprob: "probability of each token",
  mask: "tokens that are trained", advantage: "advantage over its siblings (GRPO)",
};

export function showGroup(group, colour, choose, acts) {
  const records = Object.entries({ ...group.record, trace: group.trace_id }).filter(([name, value]) => value && !["entry", "token"].includes(name));
  const parts = [
    el("p", {}, el("a", { href: "#/groups" }, "← groups")),
    el("h2", {}, group.gid, " ", el("small", {}, group.places.join(" + ") || "lost")),
    group.dead_letter ? el("p", { class: "bad" }, `dead letter: ${group.dead_letter.reason ?? JSON.stringify(group.dead_letter)}`) : null,
    acts,
    el("details", {}, el("summary", {}, "record"), table([["field", (r) => r[0]], ["value", (r) => r[1]]], records)),
  ];
  for (const message of group.messages || []) {
    parts.push(el("div", { class: "dim" }, message.role ?? "?"), el("div", { class: "said" }, text(message.content)));
  }
  if (group.ground_truth !== null && group.ground_truth !== undefined) parts.push(el("p", {}, el("span", { class: "dim" }, "ground truth "), text(group.ground_truth)));
  const members = group.members.filter((member) => member.tokens);
  if (!members.length) parts.push(el("p", { class: "dim" }, group.gone || "nothing has been generated yet"));
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
  const cells = member.response_ids.map((id, position) => {
    const hint = `token ${id}, version ${versionAt(member, position) ?? "–"}, logprob ${number(member.logprobs[position], 3)}${trained(member, position) ? "" : ", not trained"}`;
    return el("span", { class: classOf(member, position, advantage, colour), title: hint }, named ? member.token_texts[position] : id);
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

const trained = (member, position) => member.response_mask === null || Boolean(member.response_mask[position]);
const versionAt = (member, position) => member.spans.find((span) => span.start <= position && position < span.start + span.length)?.version;

function classOf(member, position, advantage, colour) {
  if (colour === "mask") return trained(member, position) ? "" : "masked";
  if (colour === "advantage") return !trained(member, position) || !advantage ? "" : advantage > 0 ? "plus" : "minus";
  const version = versionAt(member, position);
  if (version === undefined) return "not-sampled";
  if (colour === "version") return `v${version % 6}`;
  const p = Math.exp(member.logprobs[position]);
  return p < 0.001 ? "p0" : p < 0.05 ? "p1" : p < 0.3 ? "p2" : "p3";
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
