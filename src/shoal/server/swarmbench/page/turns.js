// What a turn comes to: the line that closes it.

/** A run's agents in numbers, as the history has them; null when nothing ran. */
export function totalsOf({ together, settings }) {
  const sum = together.summary;
  if (!sum) return null;
  const agents = together.cards.length - (settings.synthesis ? 1 : 0);
  return { agents, tokens: sum.tokens, wall_s: sum.wall_s, prompt_tokens: sum.prompt_tokens, cached_tokens: sum.cached_tokens };
}

/** "8 agents, 385 tokens, 2.9 s · 640 of 800 prompt tokens not computed again (80 %)" */
export function totalsLine(totals) {
  if (!totals) return "";
  const { agents, tokens, wall_s: wall, prompt_tokens: prompt, cached_tokens: cached } = totals;
  const line = `${agents} ${agents === 1 ? "agent" : "agents"}, ${tokens} tokens, ${wall.toFixed(1)} s`;
  if (!prompt) return line; // a run of an earlier version, or one of which no prompt was read
  return `${line} · ${cached} of ${prompt} prompt tokens not computed again (${Math.round((100 * cached) / prompt)} %)`;
}
