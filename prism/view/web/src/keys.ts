// Keys for the whole page. A key that a control in focus understands stays with it.

export type Action = "back" | "forward" | "first" | "last" | "play" | "cursor" | "view" | "prompt" | "theme" | "help";

const ACTIONS: Record<string, Action> = {
  ArrowLeft: "back", ArrowRight: "forward", Home: "first", End: "last", " ": "play",
  c: "cursor", v: "view", "/": "prompt", t: "theme", "?": "help",
};

export function listen(act: (action: Action, event: KeyboardEvent) => void): void {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.activeElement instanceof HTMLElement) document.activeElement.blur();
    const action = ACTIONS[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    const focus = event.target instanceof Element ? event.target : document.body;
    if (focus.matches("input[type=text], select, dialog[open], dialog[open] *")) return;
    if (action === "play" && focus.matches("button, summary, input:not([type=range])")) return;
    if (focus.matches("input[type=radio]") && /^(back|forward)$/.test(action)) return;
    event.preventDefault();
    act(action, event);
  });
}
