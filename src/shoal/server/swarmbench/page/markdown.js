// Markdown from a model, as nodes. Three walls: raw HTML is shown as text, DOMPurify lets only plain markup through,
// and the page's content policy runs no script that is not the page's own.

import { Marked } from "./vendor/marked.js";

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (character) => escapes[character]);
const isSafe = (href) => /^(https?:|mailto:)/i.test(href);

const marked = new Marked({
  async: false,
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ raw }) => escaped(raw),
    link({ href, raw, tokens }) {
      return isSafe(href) ? `<a href="${escaped(href)}">${this.parser.parseInline(tokens)}</a>` : escaped(raw);
    },
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "start", "align"],
  RETURN_DOM_FRAGMENT: true,
};

/** A fragment for a text that nobody vouches for. */
export function render(text) {
  const fragment = window.DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    if (!isSafe(link.getAttribute("href") ?? "")) {
      link.replaceWith(...link.childNodes);
      continue;
    }
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  return fragment;
}

// Words within a line that has begun mean to Markdown what they say.
const PLAIN = /^[\p{L}\p{N} ,;'’]+$/u;
const BEGUN = /\p{L}{2}[^\n]*$/u;

/**
 * Show the text in an element that shows its beginning `shown`. Most of what streams is a few more words: those go
 * to the end of the last text node, which costs a hundredth of rendering all again.
 */
export function grow(element, shown, text) {
  const more = text.slice(shown.length);
  if (PLAIN.test(more) && BEGUN.test(shown) && text.startsWith(shown)) {
    let last = element.lastChild;
    while (last?.lastChild) last = last.lastChild;
    const parent = last?.parentElement;
    if (last?.nodeType === Node.TEXT_NODE && !parent.closest("a, code") && shown.endsWith(last.data.slice(-2))) {
      last.appendData(more);
      return;
    }
  }
  element.replaceChildren(render(text));
}
