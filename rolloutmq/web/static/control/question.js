// Ask before something is done: a dialog with what will happen, and perhaps a choice.

import { el } from "../frame/draw.js";

// Returns a promise of the chosen value, or null where the answer is no.
// choices: [[value, words, explanation]]; without them, the value is true.
export function confirmed({ title, text, yes, stops = false, choices = [] }) {
  const dialog = document.getElementById("question");
  return new Promise((resolve) => {
    const answer = (value) => { dialog.close(); resolve(value); };
    const form = el("form", { method: "dialog", onsubmit: (event) => {
      event.preventDefault();
      answer(choices.length ? new FormData(form).get("choice") : true);
    } },
    el("h2", { id: "question-title" }, title), [text].flat().map((line) => el("p", {}, line)),
    choices.map(([value, words, explanation], at) => el("label", { class: "choice" },
      el("input", { type: "radio", name: "choice", value, checked: at === 0 }), " ", el("b", {}, words), el("div", { class: "dim" }, explanation))),
    el("div", { class: "acts" }, el("button", { type: "button", onclick: () => answer(null) }, "Cancel"),
      el("button", { class: stops ? "stops" : "main" }, yes)));
    dialog.replaceChildren(form);
    dialog.oncancel = () => resolve(null);
    dialog.showModal();
  });
}
