// A list of groups, of the queue or of the sample log: what became of each, its scores and lengths,
// and the first lines of its prompt and its responses.

import { el, number } from "../frame/draw.js";
import { asText, SPECIAL, visible } from "./said.js";

const oneLine = (text) => visible(text.replace(SPECIAL, "")).replace(/\s+/g, " ").slice(0, 300);
const firstLine = (text) => text.trimStart().replace(/^<think>\s*/, "").split("\n", 1)[0];

// entries: {gid, step, state: nodes, mean, tokens, staleness, version, prompt, responses, excerpt, reason};
// heading(title, field) makes the head of a column; link(entry) leads to the group.
export function groupRows(entries, heading, link) {
  const columns = [["group"], ["reward", "reward"], ["tokens", "tokens"], ["staleness", "staleness"], ["prompt and responses"]];
  const row = (entry) => el("tr", {},
    el("td", {}, el("b", {}, link(entry)), el("div", { class: "state" }, entry.state)),
    el("td", { class: "n" }, known("reward", number(entry.mean, 3)), el("span", { class: "dots" }, entry.responses.map(({ score }) => el("i", { class: score === null ? "" : score > 0 ? "plus" : "minus" })))),
    el("td", { class: "n" }, known("tokens", number(entry.tokens))), el("td", { class: "n", title: `weights ${entry.version ?? "–"}` }, known("staleness", entry.staleness ?? "–")),
    el("td", { class: "texts" }, texts(entry)));
  return el("table", { class: "groups" }, el("thead", {}, el("tr", {}, columns.map(([title, field]) => heading(title, field)))), el("tbody", {}, entries.map(row)));
}

// On a narrow screen, a row is a block, and each value has its name.
const known = (name, value) => el("span", { "data-name": name }, value);

function texts({ prompt, responses, excerpt, reason, at_ms: at }) {
  const best = [...responses].sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity))[0];
  const all = !best ? null : responses.length < 2 ? response(best)
    : el("details", { class: "responses" }, el("summary", {}, response(best), el("small", { class: "dim" }, `all ${responses.length}`)), responses.map(response));
  return [prompt ? line([el("span", { class: "dim" }, "prompt ")], prompt) : null, excerpt ? line([el("span", { class: "dim" }, "found ")], excerpt) : null,
    at ? el("p", { class: "dim" }, new Date(at).toLocaleString([], { hour12: false })) : null, reason ? el("p", { class: "first-line bad" }, oneLine(reason)) : null, all];
}

const line = (before, text) => el("p", { class: "first-line", dir: "auto" }, before, oneLine(text));

function response({ index, line: text, score, tokens, truncated }) {
  return line([el("span", { class: "dim" }, `#${index} `), el("span", { class: `score ${score === null ? "" : score > 0 ? "plus" : "minus"}` }, number(score, 2)),
    el("span", { class: truncated ? "near" : "dim" }, ` ${number(tokens)} ${tokens === 1 ? "token" : "tokens"}${truncated ? ", truncated" : ""} `)], text);
}

export function ofQueue(group) {
  const words = [group.stage && group.stage !== group.status ? group.stage : "", group.stage === "waiting" || group.stage === "running" ? "" : group.status].filter(Boolean).join(": ");
  const holder = group.stage === "taken" ? ` ${group.batch}` : group.owner ? ` ${group.owner}` : "";
  const tries = group.tries > 1 ? `, try ${group.tries}` : "";
  const state = [el("span", { class: group.stage === "dead" ? "bad" : "" }, words), el("span", { class: "dim" }, group.stage ? `${holder}${tries}` : " its payload is freed")];
  return { ...group, state, mean: group.reward ?? null, responses: group.responses ?? [] };
}

export function ofSample(sample) {
  const scores = sample.members.map((member) => member.reward?.score ?? null), known = scores.filter((score) => score !== null);
  const asked = sample.messages?.at(-1)?.content ?? sample.prompt ?? "";
  return {
    ...sample, state: [el("span", { class: `why ${sample.why}` }, sample.why), el("span", { class: "dim" }, ` step ${sample.step}`)],
    mean: known.length ? known.reduce((a, b) => a + b, 0) / scores.length : null, tokens: sample.members.reduce((sum, member) => sum + member.tokens, 0),
    version: Math.min(...sample.members.flatMap((member) => (member.spans ?? []).map((span) => span.version))),
    prompt: firstLine(asText(asked)),
    responses: sample.members.map((member, at) => ({ index: member.index, score: scores[at], tokens: member.tokens, truncated: member.finish_reason === "length",
      line: firstLine(member.turns?.[0]?.text ?? member.response ?? "") })),
  };
}
