// The text: prompt and completion as one line of tokens that wraps, the current one marked.

import type { Trace } from "./trace";

export class Strip {
  private spans: HTMLElement[] = [];
  private current = -1;
  private scrolls = false; // the text is longer than its box
  private scrolling = 0; // the frame in which it will follow what arrives

  constructor(private readonly root: HTMLElement, pick: (token: number) => void) {
    root.addEventListener("click", (event) => {
      const token = this.spans.indexOf(event.target as HTMLElement);
      if (token >= 0 && root.dataset.live !== "yes") pick(token);
    });
  }

  /** Empties it for a prompt whose completion is about to come, token by token. */
  begin(prompt: string[]): void {
    this.root.dataset.live = "yes";
    this.fill(prompt, prompt.length);
  }

  append(token: string): void {
    this.root.append(this.span(token, "completion"));
    this.scrolling ||= requestAnimationFrame(() => {
      this.scrolling = 0;
      if (this.root.dataset.live === "yes") this.root.scrollTop = this.root.scrollHeight;
    });
  }

  show(trace: Trace): void {
    delete this.root.dataset.live;
    this.fill(trace.raw.tokens, trace.raw.prompt);
    this.spans.forEach((span, token) => {
      if (!trace.isWrong(token)) return;
      span.classList.add("wrong");
      span.title = trace.expected(token) ? `should be ${trace.expected(token)}` : "the answer has ended before this";
    });
  }

  step(at: number): void {
    this.spans[this.current]?.classList.remove("current");
    this.spans[this.current]?.removeAttribute("aria-current");
    this.spans[this.current + 1]?.classList.remove("next");
    this.current = at;
    const span = this.spans[at];
    span?.classList.add("current");
    span?.setAttribute("aria-current", "step");
    this.spans[at + 1]?.classList.add("next");
    if (span && this.scrolls) this.keepInView(span);
  }

  private fill(tokens: string[], prompt: number): void {
    this.current = -1;
    this.spans = [];
    const kind = (index: number) => (index < prompt ? "prompt" : "completion");
    this.root.replaceChildren(...tokens.map((token, index) => this.span(token, kind(index))));
    this.scrolls = this.root.scrollHeight > this.root.clientHeight + 2;
  }

  private span(token: string, kind: string): HTMLElement {
    const span = document.createElement("span");
    span.className = token.length > 1 ? `${kind} word` : kind;
    span.textContent = token;
    this.spans.push(span);
    return span;
  }

  private keepInView(span: HTMLElement): void {
    const { root } = this; // which is what offsets are counted from
    const [top, bottom] = [span.offsetTop, span.offsetTop + span.offsetHeight];
    if (top < root.scrollTop) root.scrollTop = top - 8;
    else if (bottom > root.scrollTop + root.clientHeight) root.scrollTop = bottom - root.clientHeight + 8;
  }
}
