// Who waited for whom in the last steps: a lane for the trainer and each worker, coloured by what
// it did or waited for.

import { el } from "../frame/draw.js";

const SVG = "http://www.w3.org/2000/svg";
// what a span is -> [words, colour]
const WORDS = {
  wait: ["waits for groups", "near"], read: ["reads them", "s5"], pause: ["waits for a pause", "s6"], train: ["trains", "s0"], publish: ["publishes weights", "s2"],
  works: ["generates", "s1"], partly: ["generates, less than half full", "s3"], jobs: ["waits for jobs", "near"], weights: ["waits for weights", "s2"], paused: ["is paused", "s7"],
};

export const lanes = {
  title: "Who waited for whom", path: "waits",
  draw(found) {
    if (!found) return null;
    const { lanes: all, words, began_s: began, ended_s: ended } = found;
    const kinds = new Set(all.flatMap(([, spans]) => spans.map(([, , what]) => what)));
    const key = Object.entries(WORDS).filter(([what]) => kinds.has(what)).map(([, [said, colour]]) => el("span", { class: "entry" }, el("span", { class: `swatch ${colour}` }), said));
    const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour12: false });
    return [el("p", {}, words), ...all.map(([name, spans]) => lane(name, spans, began, ended - began)),
      el("div", { class: "ends dim" }, el("span", {}, clock(began)), el("span", {}, clock(ended))), el("div", { class: "legend" }, key)];
  },
};

function lane(name, spans, began, whole) {
  const drawing = document.createElementNS(SVG, "svg");
  const at = (seconds) => `${(100 * seconds) / whole}%`;
  for (const [from, to, what] of spans) {
    const part = document.createElementNS(SVG, "rect"), title = document.createElementNS(SVG, "title");
    title.textContent = `${name} ${WORDS[what][0]}, ${(to - from).toFixed(1)} s`;
    for (const [attribute, value] of Object.entries({ x: at(from - began), width: at(to - from), height: "100%", class: WORDS[what][1] })) part.setAttribute(attribute, value);
    part.append(title);
    drawing.append(part);
  }
  return el("div", { class: "lane", "data-key": name }, el("span", { title: name }, name), drawing);
}
