// The tokens of a rollout in colours: by version, probability, mask or advantage.

import { el, number } from "../frame/draw.js";
import { visible } from "./said.js";

export const COLOURS = {
  version: "policy version of each token", logprob: "probability of each token",
  mask: "tokens that are trained", advantage: "advantage over its siblings (GRPO)",
  mismatch: "log-probability, trainer's beside the engine's", entropy: "the policy's entropy as it was trained",
};
// Bounds of the classes p3 to p0; values in nats.
const BOUNDS = { mismatch: [0.01, 0.1, 0.5], entropy: [0.05, 0.5, 1.5] };
const OF_TRAINER = Object.keys(BOUNDS);
const MOST = 4000;

export function key(colour, members) {
  const entries = {
    version: [...new Set(members.flatMap((m) => m.spans.map((s) => s.version)))].sort((a, b) => a - b).map((v) => [`v${v % 6}`, `version ${v}`]).concat([["not-sampled", "not sampled"]]),
    logprob: [["p0", "p < 0.1 %"], ["p1", "p < 5 %"], ["p2", "p < 30 %"], ["p3", "likely"]],
    mask: [["trained", "trained"], ["masked", "not trained"]],
    ...Object.fromEntries(OF_TRAINER.map((name) => [name, levels(BOUNDS[name])])),
    advantage: [["plus large", "1 or more above its siblings"], ["plus", "better"], ["", "no advantage"], ["minus", "worse"], ["minus large", "1 or more below"], ["masked", "not trained"]],
  }[colour];
  return el("p", { class: "key", id: "key" }, (entries ?? []).map(([name, words]) => el("span", { class: name }, words)));
}

const levels = ([low, middle, high]) => [["p3", `below ${low}`], ["p2", `below ${middle}`], ["p1", `below ${high}`], ["p0", `${high} or more`], ["not-sampled", "not computed: no gradient"]];

// The colours that the rollouts of a group have numbers for.
export const coloursOf = (members) => Object.entries(COLOURS).filter(([name]) => !OF_TRAINER.includes(name) || members.some((member) => member.trainer_logprobs));

const mismatch = (member, position) => Math.abs(member.trainer_logprobs[position] - member.logprobs[position]);

// The numbers of a token; the trainer's beside the engine's where it computed them.
function wordsOf(member, position) {
  const words = [`token ${member.response_ids[position]}`, `version ${versionAt(member, position) ?? "–"}`, `logprob ${number(member.logprobs[position], 3)}`];
  if (isComputed(member, position)) words.push(`trainer ${number(member.trainer_logprobs[position], 3)} (mismatch ${number(mismatch(member, position), 3)})`, `entropy ${number(member.entropy[position], 3)}`);
  return [...words, trained(member, position) ? "" : "not trained"].filter(Boolean).join(", ");
}

const isComputed = (member, position) => (member.trainer_logprobs?.[position] ?? null) !== null;

export function tokenCells(member, advantage, colour) {
  const named = Boolean(member.token_texts);
  const cell = (id, position) => el("span", { class: classOf(member, position, advantage, colour), title: wordsOf(member, position) }, named ? visible(member.token_texts[position]) : id);
  const said = el("p", { class: "dim", role: "status" }), left = member.tokens - member.response_ids.length;
  let at = -1;
  // the arrow keys go through the tokens, and say the numbers of each
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], cells = block.querySelectorAll("span");
    if (!step || !cells.length) return;
    event.preventDefault();
    cells[at]?.classList.remove("at");
    at = Math.min(cells.length - 1, Math.max(0, at + step));
    cells[at].classList.add("at");
    said.textContent = cells[at].title;
  };
  const block = el("div", { class: `tokens${named ? "" : " ids"}`, dir: "auto", tabindex: "0", role: "group", "aria-label": "tokens: the arrow keys go through them", onkeydown: move }, member.response_ids.slice(0, MOST).map(cell)), more = member.response_ids.length - MOST;
  if (more > 0) block.append(el("button", { type: "button", onclick: (event) => event.target.replaceWith(...member.response_ids.slice(MOST).map((id, n) => cell(id, MOST + n))) }, `show the other ${number(more)} tokens`));
  return [block, said, left > 0 ? el("p", { class: "dim" }, `the sample log has the numbers of the first ${number(member.response_ids.length)} tokens, not of the other ${number(left)}`) : null];
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
  if (OF_TRAINER.includes(colour)) {
    if (!isComputed(member, position)) return "not-sampled";
    const value = colour === "entropy" ? member.entropy[position] : mismatch(member, position);
    return `p${3 - BOUNDS[colour].filter((bound) => value >= bound).length}`;
  }
  const version = versionAt(member, position);
  if (version === undefined) return "not-sampled";
  if (colour === "version") return `v${version % 6}`;
  const p = Math.exp(member.logprobs[position]);
  return p < 0.001 ? "p0" : p < 0.05 ? "p1" : p < 0.3 ? "p2" : "p3";
}
