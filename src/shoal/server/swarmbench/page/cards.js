// A card per agent. Sizes are fixed while text streams, so nothing moves; numbers change ten times a second at most.

import { make, say } from "./dom.js";
import { grow, render } from "./markdown.js";

const ENDED = new Set(["done", "failed", "skipped", "cancelled"]);
const LABELS = { queued: "queued", prefill: "reading", decoding: "writing", done: "done", failed: "failed", skipped: "skipped", cancelled: "stopped" };
const NUMBERS_MS = 100;

export const ended = (card) => ENDED.has(card.state);

export class CardView {
  /** `stop` is called when its button is pressed. */
  constructor(card, number, colour, stop) {
    this.card = card;
    this.shown = { text: null, state: null, at: 0, full: false };
    const id = `card-${number}`;
    this.name = make("h3", { id }, card.name);
    this.state = make("span", { className: "state" });
    this.stop = make(
      "button",
      { type: "button", className: "icon small", onclick: stop, attributes: { "aria-label": `Stop ${card.name}`, title: "Stop" } },
      "■",
    );
    this.body = make("div", { className: "card-body", tabIndex: 0, attributes: { role: "region", "aria-labelledby": id } });
    this.text = make("div", { className: "prose" });
    this.body.append(this.text);
    this.facts = make("p", { className: "card-facts" });
    this.element = make(
      "article",
      { className: "card", dataset: { number }, attributes: { "aria-labelledby": id } },
      make("header", {}, make("span", { className: `mark agent-${colour}`, attributes: { "aria-hidden": "true" } }), this.name, this.state, this.stop),
      this.body,
      this.facts,
    );
    this.element.setAttribute("aria-busy", "true");
  }

  get dirty() {
    const { card, shown } = this;
    return shown.text !== card.text || shown.state !== card.state || (ended(card) && !shown.full);
  }

  /** Show what changed; `now` in ms. Numbers follow a little later, but at once when the state changes. */
  update(now) {
    const { card, shown } = this;
    const turned = shown.state !== card.state;
    if (shown.text !== card.text) {
      if (ended(card) || shown.text === null) this.text.replaceChildren(render(card.text));
      else grow(this.text, shown.text, card.text);
      shown.text = card.text;
      shown.whole = ended(card);
    }
    if (turned) {
      if (ended(card) && !shown.whole) this.text.replaceChildren(render(card.text));
      this.element.dataset.state = card.state;
      this.element.setAttribute("aria-busy", String(!ended(card)));
      say(this.state, LABELS[card.state] ?? card.state);
      this.stop.hidden = ended(card);
      shown.state = card.state;
      // The end was in sight while it grew (see run.css); now the beginning is, unless somebody reads elsewhere.
      if (ended(card) && this.body.scrollTop === 0) this.body.scrollTop = -this.body.scrollHeight;
    }
    if (turned || now - shown.at >= NUMBERS_MS) {
      say(this.facts, facts(card));
      shown.at = now;
      shown.full = ended(card);
    }
  }
}

function facts(card) {
  if (card.error) return card.error;
  if (!card.tokens) return card.task; // nothing yet, or a node that wrote nothing itself
  const told = [`${card.tokens} tok`];
  if (card.tokens_per_s) told.push(`${Math.round(card.tokens_per_s)} tok/s`);
  if (card.ttft_ms !== null) told.push(`TTFT ${Math.round(card.ttft_ms)} ms`);
  told.push(`${card.cached_tokens} cached`);
  if (card.replica) told.push(`on ${card.replica}`);
  if (card.finish_reason === "length") told.push("cut at the limit");
  return told.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · "); // lines break between facts
}
