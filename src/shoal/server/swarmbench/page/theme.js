// Before anything is painted: the theme that was chosen. Small and blocking on purpose.
"use strict";
try {
  const chosen = JSON.parse(localStorage.getItem("shoal") || "{}").theme;
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is forbidden or holds something else: the system's theme it is.
}
