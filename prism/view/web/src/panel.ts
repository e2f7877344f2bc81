// What the model does at this token, in words and in bars: predictions, and the gates of the two cursors.

import { percent, signed } from "./axes";
import { FULL, GATES, meetings, peak, type Pair, type Series, type Trace } from "./trace";

const quoted = (token: string) => `“${token}”`;

/** The step as sentences: the figure, for ears, and for whoever sees it for the first time. */
export function told(trace: Trace, pair: Pair | null, layer: number, head: number, at: number): string {
  const { tokens, prompt, predictions } = trace.raw;
  const whose = at < prompt ? "The prompt's" : "The model's own";
  const says = [`${whose} token ${at}, ${quoted(tokens[at])}, has been read.`];
  if (pair) {
    const here = peak(pair.query, at);
    const near = meetings(pair, at);
    const met = near.filter((one) => one.weight > 0.25);
    const stands = here.mass < 0.5 ? "is spread around" : "stands at";
    const partly = near.length ? `where the key of token ${near[0].token} ${quoted(tokens[near[0].token])} stands in part`
      : "where no key stands";
    const keys = met.length === 0 ? partly
      : met.length === 1 ? `where the key of token ${met[0].token} ${quoted(tokens[met[0].token])} stands`
      : `where the keys of ${met.length} tokens stand`;
    says.push(`The query cursor ${stands} ${signed(here.offset)}, ${keys}.`);
  }
  const [read] = trace.reads(layer, head, at);
  if (read) {
    const which = read.token === at ? "this token itself" : `token ${read.token} ${quoted(tokens[read.token])}`;
    says.push(read.weight > 0.5 ? `The head reads ${which} (${percent(read.weight)}).`
      : `The head spreads its attention; most, ${percent(read.weight)}, is on ${which}.`);
  }
  const [best] = predictions[at] ?? [];
  if (at + 1 >= tokens.length) {
    says.push("Here the writing ended.");
  } else if (best) {
    const due = at + 1 >= prompt ? trace.expected(at + 1) : null;
    const verdict = due === null ? ""
      : due === best[0] ? ", which is right" : due ? `; right would be ${quoted(due)}` : "; the answer has ended";
    const when = at + 1 < prompt ? "Were the prompt to end here, it would say" : "Next it says";
    says.push(`${when} ${quoted(best[0])} (${percent(best[1])})${verdict}.`);
  }
  return says.join(" ");
}

/** Rows made once and then only changed: a step must not lay the page out anew. */
class Bars {
  private readonly rows: { row: HTMLElement; name: HTMLElement; fill: HTMLElement; value: HTMLElement }[] = [];

  constructor(root: HTMLElement, count: number) {
    for (let i = 0; i < count; i++) {
      const [row, name, track, fill, value] = ["bar", "name", "track", "fill", "value"].map((kind) => {
        const element = document.createElement(kind === "bar" ? "div" : "span");
        element.className = kind;
        return element;
      });
      track.append(fill);
      row.append(name, track, value);
      root.append(row);
      this.rows.push({ row, name, fill, value });
    }
  }

  /** `from`: where the bar begins, for bars that add up to one another. */
  set(index: number, name: string, share: number | null, kind = "", from = 0): void {
    const { row, name: label, fill, value } = this.rows[index];
    row.className = share === null ? "bar empty" : `bar ${kind}`;
    if (label.textContent !== name) label.textContent = name;
    fill.style.transform = `translateX(${100 * from}%) scaleX(${share ?? 0})`;
    value.textContent = share === null ? "" : percent(share);
  }
}

export class Predictions {
  private readonly bars: Bars;

  constructor(private readonly heading: HTMLElement, root: HTMLElement) {
    this.bars = new Bars(root, 5);
  }

  step(trace: Trace, at: number): void {
    const { tokens, predictions, prompt } = trace.raw;
    this.heading.textContent = at + 1 < tokens.length ? `Token ${at + 1}, predicted` : "Beyond the end, predicted";
    const due = at + 1 >= tokens.length ? null : trace.expected(at + 1) ?? (at + 1 < prompt ? null : undefined);
    for (let place = 0; place < 5; place++) {
      const one = predictions[at]?.[place];
      const came = one && tokens[at + 1] === one[0];
      const kind = !one ? "" : came && due !== undefined && due !== null && due !== one[0] ? "came wrong"
        : came ? "came" : due === one[0] ? "due" : "";
      this.bars.set(place, one ? one[0] : " ", one ? one[1] : null, kind);
    }
  }
}

const SIGNS = ["+1", "stay", "−1", "home", "jump"];

/** Five gates of one cursor: three ways to move, which add up to 1 and are drawn so; home and jump, beside them. */
export class Gates {
  private readonly bars: Bars;

  constructor(private readonly root: HTMLElement) {
    this.bars = new Bars(root, 5);
    GATES.forEach((gate, place) => (root.children[place] as HTMLElement).title = gate);
  }

  step(series: Series | null, at: number): void {
    this.root.hidden = series === null;
    if (!series) return;
    let from = 0;
    GATES.forEach((gate, place) => {
      const copies = gate !== "copy" || series.facts.copies;
      const share = series.gates[at * GATES.length + place] / FULL;
      this.bars.set(place, SIGNS[place], copies ? share : null, gate, place < 3 ? from : 0);
      from += share;
      (this.root.children[place] as HTMLElement).hidden = !copies;
    });
  }
}
