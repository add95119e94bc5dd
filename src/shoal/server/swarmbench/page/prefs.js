// What was chosen, remembered in this browser.

const NAME = "shoal";
const DEFAULTS = {
  theme: "auto",
  count: 8,
  team: null, // [{name, task, on}]; null: the built-in ones
  oneByOne: false,
  synthesis: true,
  sharing: true,
  maxTokens: 160,
  temperature: 0.4,
  seed: "",
  historyOpen: false,
};

function read() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(NAME) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

export const prefs = read();

/** Change choices and remember them, as far as the browser lets us. */
export function choose(changes) {
  Object.assign(prefs, changes);
  try {
    localStorage.setItem(NAME, JSON.stringify(prefs));
  } catch {
    // A browser without storage forgets; nothing else depends on it.
  }
}
