// A thread: the turns before the run on the screen, and the line that closes each turn.

import { $, make, say } from "./dom.js";
import { render } from "./markdown.js";

/** A run's agents in numbers, as the history has them; null when nothing ran. */
export function totalsOf({ together, settings, graph }) {
  const sum = together.summary;
  if (!sum) return null;
  const { cards } = together;
  const wrote = cards.filter((card) => card.prompt_tokens > 0); // nodes of rules do not
  const agents = graph ? wrote.length : cards.length - (settings.synthesis ? 1 : 0);
  return { agents, tokens: sum.tokens, wall_s: sum.wall_s, prompt_tokens: sum.prompt_tokens, cached_tokens: sum.cached_tokens };
}

/** "8 agents, 385 tokens, 2.9 s · 640 of 800 prompt tokens not computed again (80 %)" */
export function totalsLine(totals) {
  if (!totals) return "Nothing ran.";
  const { agents, tokens, wall_s: wall, prompt_tokens: prompt, cached_tokens: cached } = totals;
  const line = `${agents} ${agents === 1 ? "agent" : "agents"}, ${tokens} tokens, ${wall.toFixed(1)} s`;
  if (!prompt) return line; // a run of an earlier version, or one of which no prompt was read
  return `${line} · ${cached} of ${prompt} prompt tokens not computed again (${share(totals)})`;
}

/** How much of a turn's prompts was not computed again; "" where that is not known. */
export function share(totals) {
  return totals?.prompt_tokens ? `${Math.round((100 * totals.cached_tokens) / totals.prompt_tokens)} %` : "";
}

/** Show the turns before a run, above it. */
export function showEarlier({ earlier, left_out: leftOut }) {
  $("earlier").hidden = !earlier.length;
  $("earlier").replaceChildren(...earlier.map((turn, i) => earlierTurn(turn, i < leftOut)));
}

function earlierTurn({ id, question, answer, totals }, leftOut) {
  const title = make("h2", {}, make("a", { href: `#${id}`, title: "Show this turn with all its cards" }, question));
  const prose = make("div", { className: "prose" });
  prose.append(render(answer || "Nobody wrote anything."));
  const note = leftOut ? " · not read any more: the window of the model is full" : "";
  return make("li", {}, title, prose, make("p", { className: "totals" }, totalsLine(totals) + note));
}

/** What the message box and the buttons beside it offer: `thread` is true while a run is on the screen. */
export function showThread(thread) {
  $("fresh").hidden = !thread;
  $("question").placeholder = thread ? "Ask all of them a follow-up" : "Ask all of them one question";
  say($("question-label"), thread ? "Follow-up for all agents" : "Question for all agents");
}
