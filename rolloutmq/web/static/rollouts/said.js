// What a model or a tool said, as elements. Nothing of it is ever parsed as HTML of this page: the text becomes
// Markdown, in which HTML stays text, and what comes of it passes DOMPurify without links, images and styles.

import { el, number } from "../frame/draw.js";

const LONGEST_MARKDOWN = 20000, LONGEST_TEXT = 50000, LONGEST_TEX = 2000;
const FORBIDDEN = { FORBID_TAGS: ["a", "img", "style", "form", "input", "button", "select", "textarea", "video", "audio", "picture", "source", "dialog", "details"], FORBID_ATTR: ["style", "id", "name", "href", "src", "srcset", "action", "xlink:href"] };
let markdown = null, loading = null;

const script = (src) => new Promise((resolve, reject) => {
  document.head.append(Object.assign(document.createElement("script"), { src, onload: resolve, onerror: () => reject(new Error(`cannot load ${src}`)) }));
});
const here = import.meta.resolve;

// Load the libraries, once, when the first group is opened.
export function loadLibraries() {
  loading ??= Promise.all([import("./vendor/marked.js"), script(here("./vendor/purify.js")), script(here("./vendor/temml.js")), script(here("./vendor/diff.js"))]).then(([{ Marked }]) => {
    markdown = new Marked({ gfm: true, breaks: true, extensions: [mathematics("display", "block"), mathematics("inline", "inline")], renderer: RENDERER });
  });
  return loading;
}

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

const RENDERER = {
  html: (token) => escaped(token.text),
  image: (token) => escaped(token.raw),
  link(token) { return `<span class="link" title="${escaped(token.href)}">${this.parser.parseInline(token.tokens)}</span>`; },
  heading(token) { return `<p class="title">${this.parser.parseInline(token.tokens)}</p>`; },
  checkbox: (token) => (token.checked ? "☑ " : "☐ "),
};

const TEX = {
  display: /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])/,
  inline: /^(?:\\\(([^]+?)\\\)|\$(?![\s$])((?:\\[^]|[^$\\\n])+?)\$(?!\d)|(\\boxed\{[^{}\n]*\}))/,
};

function mathematics(kind, level) {
  return {
    name: kind, level,
    start: (source) => { const at = source.search(kind === "display" ? /\$\$|\\\[/ : /\$|\\\(|\\boxed/); return at < 0 ? undefined : at; },
    tokenizer(source) {
      const found = TEX[kind].exec(source);
      return found ? { type: kind, raw: found[0], tex: found.slice(1).find((part) => part !== undefined) } : undefined;
    },
    renderer: ({ raw, tex }) => {
      if (tex.length > LONGEST_TEX) return escaped(raw);
      try {
        const made = window.temml.renderToString(tex, { displayMode: kind === "display", throwOnError: true, trust: false, maxExpand: 200, maxSize: [10, 100] });
        // the page allows no inline style
        return made.replaceAll(' style="padding:3pt;border:1px solid;"', ' class="boxed"').replace(/ style="[^"]*"/g, "");
      } catch {
        return `<code>${escaped(raw)}</code>`; // the model made a mistake: what it wrote is shown
      }
    },
  };
}

// Show signs that would be invisible, or would move other text: control characters, and changes of direction.
export function visible(text) {
  return text.replace(/\r\n/g, "\n")
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, (sign) => `⟨U+${sign.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`)
    .replace(/\p{Surrogate}/gu, "\ufffd");
}

// Plain text; of very long text the beginning, and a button for the rest.
export function plain(text, kind = "said") {
  const shown = visible(text), block = el("div", { class: kind, dir: "auto" }, shown.slice(0, LONGEST_TEXT));
  if (shown.length > LONGEST_TEXT) block.append(el("button", { type: "button", onclick: (event) => event.target.replaceWith(shown.slice(LONGEST_TEXT)) }, `show the other ${number(shown.length - LONGEST_TEXT)} characters`));
  return block;
}

export function rendered(text) {
  if (!text.trim()) return null;
  if (text.length > LONGEST_MARKDOWN) return plain(text);
  const block = el("div", { class: "said rendered", dir: "auto" });
  block.append(window.DOMPurify.sanitize(markdown.parse(visible(text)), { RETURN_DOM_FRAGMENT: true, USE_PROFILES: { html: true, mathMl: true }, ...FORBIDDEN }));
  return block;
}

export const SPECIAL = /<\|[^|<>]{1,60}\|>/g; // tokens of chat templates
const PARTS = /<(think|thinking|tool_call|tool_response)>([^]*?)(?:<\/\1>|$)/g;
const NAMES = { think: "thought", thinking: "thought", tool_call: "tool call", tool_response: "tool result" };

export function folded(name, text, isOpen = false) {
  return el("details", { class: "fold", open: isOpen }, el("summary", {}, name, " ", el("small", {}, `${number(text.length)} characters`)), plain(indented(text.trim())));
}

function indented(text) {
  if (!/^[{[]/.test(text)) return text;
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

// A response with its thoughts, tool calls and results folded, and the rest rendered.
export function response(text) {
  const parts = [];
  // templates that open the thought in the prompt leave only its end in the response
  const end = text.indexOf("</think>"), begin = text.indexOf("<think>");
  if (end >= 0 && (begin < 0 || begin > end)) {
    parts.push(folded("thought", text.slice(0, end)));
    text = text.slice(end + "</think>".length);
  }
  let at = 0;
  for (const found of text.matchAll(PARTS)) {
    parts.push(rendered(text.slice(at, found.index)), folded(NAMES[found[1]], found[2]));
    at = found.index + found[0].length;
  }
  parts.push(rendered(text.slice(at)));
  return parts.filter(Boolean);
}

export const asText = (value) => (typeof value === "string" ? value : value === null || value === undefined ? "" : JSON.stringify(value, null, 2));

// The content of a message: text, or a list of parts of which images are named.
function contentOf(message) {
  if (!Array.isArray(message.content)) return asText(message.content);
  return message.content.map((part) => (part?.type === "text" ? asText(part.text) : `[${asText(part?.type)}]`)).join("\n");
}

export function showMessage(message, isRendered) {
  const text = contentOf(message), role = String(message.role ?? "?");
  const calls = (message.tool_calls ?? []).map((call) => folded(`tool call ${asText(call?.function?.name ?? call?.name)}`, asText(call?.function?.arguments ?? call?.arguments ?? call)));
  const isFolded = (role === "system" && text.length > 600) || role === "tool";
  const content = isFolded ? [folded(role, text)] : isRendered ? response(text) : [plain(text)];
  return el("div", { class: "message" }, el("div", { class: "role" }, visible(role)), content, calls);
}
