// The tokens of a rollout in colours: by version, probability, mask or advantage.

import { el, number } from "../frame/draw.js";
import { visible } from "./said.js";

export const COLOURS = {
  version: "policy version of each token", logprob: "probability of each token",
  mask: "tokens that are trained", advantage: "advantage over its siblings (GRPO)",
};
const MOST = 4000;

export function key(colour, members) {
  const entries = {
    version: [...new Set(members.flatMap((m) => m.spans.map((s) => s.version)))].sort((a, b) => a - b).map((v) => [`v${v % 6}`, `version ${v}`]).concat([["not-sampled", "not sampled"]]),
    logprob: [["p0", "p < 0.1 %"], ["p1", "p < 5 %"], ["p2", "p < 30 %"], ["p3", "likely"]],
    mask: [["trained", "trained"], ["masked", "not trained"]],
    advantage: [["plus large", "1 or more above its siblings"], ["plus", "better"], ["", "no advantage"], ["minus", "worse"], ["minus large", "1 or more below"], ["masked", "not trained"]],
  }[colour];
  return el("p", { class: "key", id: "key" }, (entries ?? []).map(([name, words]) => el("span", { class: name }, words)));
}

export function tokenCells(member, advantage, colour) {
  const named = Boolean(member.token_texts);
  const cell = (id, position) => {
    const hint = `token ${id}, version ${versionAt(member, position) ?? "–"}, logprob ${number(member.logprobs[position], 3)}${trained(member, position) ? "" : ", not trained"}`;
    return el("span", { class: classOf(member, position, advantage, colour), title: hint }, named ? visible(member.token_texts[position]) : id);
  };
  const block = el("div", { class: `tokens${named ? "" : " ids"}`, dir: "auto" }, member.response_ids.slice(0, MOST).map(cell)), more = member.response_ids.length - MOST;
  if (more > 0) block.append(el("button", { type: "button", onclick: (event) => event.target.replaceWith(...member.response_ids.slice(MOST).map((id, n) => cell(id, MOST + n))) }, `show the other ${number(more)} tokens`));
  return block;
}

export function versionsOf(member) {
  const versions = [...new Set(member.spans.filter((span) => span.length).map((span) => span.version))].sort((a, b) => a - b);
  return versions.length > 3 ? `${versions[0]} to ${versions.at(-1)}` : versions.join(", ") || "–";
}

const trained = (member, position) => member.response_mask === null || Boolean(member.response_mask[position]);
const versionAt = (member, position) => member.spans.find((span) => span.start <= position && position < span.start + span.length)?.version;

function classOf(member, position, advantage, colour) {
  if (colour === "mask" || (colour === "advantage" && !trained(member, position))) return trained(member, position) ? "trained" : "masked";
  if (colour === "advantage") return !advantage ? "" : `${advantage > 0 ? "plus" : "minus"}${Math.abs(advantage) < 1 ? "" : " large"}`;
  const version = versionAt(member, position);
  if (version === undefined) return "not-sampled";
  if (colour === "version") return `v${version % 6}`;
  const p = Math.exp(member.logprobs[position]);
  return p < 0.001 ? "p0" : p < 0.05 ? "p1" : p < 0.3 ? "p2" : "p3";
}
