// Dark or light: as the system says, until somebody says otherwise here.

const KEY = "prism-view-theme";

function remembered(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // a file opened from disk may have no storage
  }
}

export function startTheme(button: HTMLButtonElement, changed: () => void): { toggle: () => void } {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const saved = remembered();
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const label = () => button.setAttribute("aria-pressed", String(isDark()));
  const toggle = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem(KEY, root.dataset.theme);
    } catch {
      // forgotten on reload, then
    }
    label();
    changed();
  };
  button.addEventListener("click", toggle);
  system.addEventListener("change", () => (label(), changed()));
  label();
  return { toggle };
}
