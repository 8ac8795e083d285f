// What a model or a tool said, as elements. Nothing of it is ever parsed as HTML of this page: the text becomes
// Markdown, in which HTML stays text, and what comes of it passes DOMPurify without links, images and styles.
// What Markdown would hide is shown as it is written, and so is text that is too deep or takes too long.

import { el, number } from "../frame/draw.js";

const LONGEST_MARKDOWN = 20000, LONGEST_TEXT = 50000, LONGEST_TEX = 2000;
const FORBIDDEN = { FORBID_TAGS: ["a", "img", "style", "form", "input", "button", "select", "textarea", "video", "audio", "picture", "source", "dialog", "details"], FORBID_ATTR: ["style", "id", "name", "href", "src", "srcset", "action", "xlink:href"] };
// Of one rollout: characters that the parser looks at, some 10 ns each. Ordinary texts take a tenth.
const WORK = 40_000_000, FORMULA = 8_000, DEEPEST = 24, MOST_PARTS = 400;
let markdown = null, loading = null, left = WORK, depth = 0;

function spend(work) {
  left -= work;
  if (left < 0) throw new RangeError("this text takes too long");
}

const script = (src) => new Promise((resolve, reject) => {
  document.head.append(Object.assign(document.createElement("script"), { src, onload: resolve, onerror: () => reject(new Error(`cannot load ${src}`)) }));
});
const here = import.meta.resolve;

// Load the libraries, once, when the first group is opened.
export function loadLibraries() {
  loading ??= Promise.all([import("./vendor/marked.js"), script(here("./vendor/purify.js")), script(here("./vendor/temml.js")), script(here("./vendor/diff.js"))]).then(([{ Marked, Tokenizer }]) => {
    markdown = new Marked({ gfm: true, breaks: true, extensions: [mathematics("display", "block"), mathematics("inline", "inline")], renderer: RENDERER, tokenizer: bounded(Tokenizer.prototype) });
  });
  return loading;
}

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

const RENDERER = {
  html: (token) => escaped(token.text),
  image: (token) => escaped(token.raw),
  link: (token) => `<span class="link">${escaped(token.raw)}</span>`,
  code: (token) => `<pre>${token.lang ? `<small>${escaped(token.lang)}</small>\n` : ""}<code>${escaped(token.text)}</code></pre>`,
  heading(token) { return `<p class="title">${this.parser.parseInline(token.tokens)}</p>`; },
  checkbox: (token) => (token.checked ? "☑ " : "☐ "),
};

const signs = (text) => text.replace(/[^\p{L}\p{N}]/gu, "");

// The parser's methods, which count what they do. A method returns false for what the parser does itself.
function bounded(own) {
  const nested = (name, work = () => 0) => function (...given) {
    spend(work(given[0]));
    if (depth >= DEEPEST) throw new RangeError("this text is too deep");
    depth += 1;
    try { return own[name].apply(this, given); } finally { depth -= 1; }
  };
  const listWork = (source) => {
    if (!/^ {0,3}(?:[-+*]|\d{1,9}[.)])(?:\s|$)/.test(source)) return 0;
    const list = source.split(/\n\n(?![ \t\n*+\d-])/, 1)[0];
    return list.length * (list.match(/^[ \t]*(?:[-+*]|\d{1,9}[.)])(?=\s|$)/gm) ?? []).length;
  };
  return {
    space(source) { spend(source.length); return false; }, // is asked first for each block, and escape for each inline part
    escape(source) { spend(source.length); return false; },
    def() {}, // a definition would be hidden
    table(source) {
      const queued = this.lexer.inlineQueue.length, made = own.table.call(this, source);
      if (!made || signs(made.raw) === signs([made.header, ...made.rows].flat().map((cell) => cell.text).join(""))) return made;
      this.lexer.inlineQueue.length = queued; // cells that the head does not have would be hidden
      return undefined;
    },
    list: nested("list", listWork),
    emStrong: nested("emStrong", (source) => (/^[*_]/.test(source) ? 4 * source.length : 0)),
    ...Object.fromEntries(["blockquote", "link", "reflink", "del"].map((name) => [name, nested(name)])),
  };
}

// Commands and comments of TeX that hide text, or that put it where it is not seen.
const TEX_HIDES = /(?:^|[^\\])(?:\\\\)*%|\\(?:[hv]?phantom|smash|[gex]?def|let|newcommand|renewcommand|providecommand|label|(?:text|page)?color|f?colorbox|(?:math)?[rlc]lap|m?kern|[hm]skip|[hm]space|tiny|char|unicode|class|id|data|href|url|includegraphics)(?![a-zA-Z])/;

const TEX = {
  display: /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])/,
  inline: /^(?:\\\(([^]+?)\\\)|\$(?![\s$])((?:\\[^]|[^$\\\n])+?)\$(?!\d)|(\\boxed\{[^{}\n]*\}))/,
};

function mathematics(kind, level) {
  return {
    name: kind, level,
    start: (source) => { const at = source.search(kind === "display" ? /\$\$|\\\[/ : /\$|\\\(|\\boxed/); return at < 0 ? undefined : at; },
    tokenizer(source) {
      if (!/^[$\\]/.test(source)) return undefined;
      spend(2 * source.length);
      const found = TEX[kind].exec(source);
      return found ? { type: kind, raw: found[0], tex: found.slice(1).find((part) => part !== undefined) } : undefined;
    },
    renderer: ({ raw, tex }) => {
      if (tex.length > LONGEST_TEX || TEX_HIDES.test(tex)) return `<code>${escaped(raw)}</code>`;
      spend(FORMULA);
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

// Signs that nobody sees, or that move other text: all but those within an emoji, and joiners of scripts that have such.
const HIDDEN = new RegExp("[\\p{Cc}\\p{Cf}\\p{Zl}\\p{Zp}\\p{Default_Ignorable_Code_Point}\\u2800](?<![\\n\\t])(?<!\\p{Extended_Pictographic}\\ufe0f)(?<![0-9#*]\\ufe0f(?=\\u20e3))"
  + "(?<![\\p{Extended_Pictographic}\\p{Emoji_Modifier}]\\ufe0f?\\u200d(?=\\p{Extended_Pictographic}))"
  + `(?<![${["Arab", "Syrc", "Deva", "Beng", "Guru", "Gujr", "Orya", "Taml", "Telu", "Knda", "Mlym", "Sinh"].map((script) => `\\p{scx=${script}}`).join("")}][\\u200c\\u200d])`, "gu");

export function visible(text) {
  return text.replace(/\r\n/g, "\n")
    .replace(HIDDEN, (sign) => `⟨U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`)
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
  try {
    block.append(window.DOMPurify.sanitize(markdown.parse(visible(text)), { RETURN_DOM_FRAGMENT: true, USE_PROFILES: { html: true, mathMl: true }, ...FORBIDDEN }));
  } catch { // it is too deep, takes too long, or is more than the parser can do
    return plain(text);
  }
  // &#8203; was no sign before; formulas have invisible signs of their own
  const words = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) if (!words.currentNode.parentElement.closest("math")) words.currentNode.data = visible(words.currentNode.data);
  return block;
}

// Show one rollout, or a prompt; what cannot be shown becomes text, and the others stay.
export function readable(what, show) {
  left = WORK;
  try { return show(what); } catch (error) {
    return el("section", { class: "panel" }, el("p", { class: "near" }, `shown as data: ${error.message}`), plain(asText(what)));
  }
}

export const SPECIAL = /<\|[^|<>]{1,60}\|>/g; // tokens of chat templates
const PARTS = /<(think|thinking|tool_call|tool_response)>([^]*?)(?:<\/\1>|$)/g;
const NAMES = { think: "thought", thinking: "thought", tool_call: "tool call", tool_response: "tool result" };

export function folded(name, text, isOpen = false) {
  return el("details", { class: "fold", open: isOpen }, el("summary", {}, name, " ", el("small", {}, `${number(text.length)} characters`)), plain(indented(text.trim())));
}

function isDeep(json) {
  let open = 0;
  for (const [sign] of json.replace(/"(?:[^"\\]|\\.)*"/g, "").matchAll(/[[\]{}]/g)) {
    open += "[{".includes(sign) ? 1 : -1;
    if (open > DEEPEST) return true;
  }
  return false;
}

function indented(text) {
  if (!/^[{[]/.test(text) || text.length > LONGEST_TEXT || isDeep(text)) return text;
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
    if (parts.length > MOST_PARTS) break;
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
  const calls = [message.tool_calls ?? []].flat().map((call) => folded(`tool call ${asText(call?.function?.name ?? call?.name)}`, asText(call?.function?.arguments ?? call?.arguments ?? call)));
  const isFolded = (role === "system" && text.length > 600) || role === "tool";
  const content = isFolded ? [folded(role, text)] : isRendered ? response(text) : [plain(text)];
  return el("div", { class: "message" }, el("div", { class: "role" }, visible(role)), content, calls);
}
