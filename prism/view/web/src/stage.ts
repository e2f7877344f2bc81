// Everything about one trace, kept in step: text, figure, lanes, words and bars.

import { Chooser, type Choice } from "./chooser";
import { Figure } from "./figure";
import { confidenceLane, gatesLane } from "./lanes";
import { Gates, Predictions, told } from "./panel";
import { Player } from "./player";
import type { View } from "./raster";
import * as server from "./server";
import { Strip } from "./strip";
import type { CursorFacts, Pair, RunFacts, Trace } from "./trace";

const byId = <Kind extends HTMLElement>(id: string) => document.getElementById(id) as Kind;
const VERDICTS = { right: "✓ right", wrong: "✗ wrong", unknown: "no known answer" };

export class Stage {
  readonly player = new Player(byId("player"), (at) => this.step(at));
  readonly strip = new Strip(byId("strip"), (token) => this.player.go(token));
  private readonly figure = new Figure(byId("figure"), (text) => (byId("readout").textContent = text));
  private readonly chooser = new Chooser(byId("chooser"), byId("cards"), (choice) => void this.choose(choice));
  private readonly predictions = new Predictions(byId("predictions-heading"), byId("predictions"));
  private readonly gates = { query: new Gates(byId("gates-query")), key: new Gates(byId("gates-key")) };
  private trace: Trace | null = null;
  private choice: Choice = { layer: 0, head: 0, cursor: null };
  private pair: Pair | null = null;
  private view: View = "both";
  private arrivals = false;
  private turn = 0; // counts choices: an answer of the server to an earlier one comes too late

  constructor(private readonly live: boolean) {
    document.body.classList.toggle("exported", !live);
    byId("views").addEventListener("change", (event) => {
      this.view = (event.target as HTMLInputElement).value as View;
      this.redraw();
    });
    byId("export").addEventListener("click", () => void this.export());
    this.followPointer(byId("figure"));
    let width = 0;
    new ResizeObserver(([entry]) => {
      if (entry.contentRect.width !== width) this.redraw();
      width = entry.contentRect.width;
    }).observe(byId("figure"));
  }

  /** Shows a trace from where its story is told: a third into the completion, at the most important cursor. */
  show(trace: Trace): void {
    this.trace = trace;
    this.arrivals = false;
    const { raw } = trace;
    const [first] = trace.suggested();
    this.see(trace, first ?? { layer: 0, head: 0 }, first);
    this.facts(raw.run);
    this.verdict(trace);
    document.body.classList.toggle("no-attention", trace.attention.length === 0);
    byId("suggestions").hidden = !first;
    byId("text").hidden = byId("stage").hidden = false;
    this.strip.show(trace);
    this.chooser.suggest(trace);
    const third = raw.prompt + Math.floor((trace.length - raw.prompt) / 3);
    this.player.open(trace.length, Math.min(trace.length - 1, third));
    this.redraw();
  }

  /** A token of a completion that is being written: it stands in the text before its trace is there. */
  arriving(prompt: string, token: string): void {
    if (!this.arrivals) {
      this.arrivals = true;
      this.player.pause();
      byId("text").hidden = false;
      this.strip.begin([prompt]);
    }
    this.strip.append(token);
  }

  /** After a prompt that failed: what was there before. */
  restore(): void {
    if (!this.arrivals) return;
    this.arrivals = false;
    if (this.trace) this.strip.show(this.trace);
    else this.strip.begin([]);
    this.step(this.player.at);
  }

  facts(run: RunFacts): void {
    const millions = (run.parameters / 1e6).toFixed(2);
    byId("facts").textContent = `${run.name} · ${run.task} · ${run.label} · ${millions} M parameters · ` +
      `trained on at most ${run.max_length}, ${run.step.toLocaleString("en")} steps`;
    document.title = `${run.name} – PRISM`;
  }

  fail(message: string): void {
    byId("error").textContent = message;
  }

  redraw(): void {
    const { trace, pair, choice, view } = this;
    if (!trace || byId("stage").hidden) return;
    this.chooser.show(trace, choice, this.live);
    this.figure.show({ trace, pair, layer: choice.layer, head: choice.head, view }, this.player.at);
    const box = this.figure.box!;
    const series = pair && (view === "key" ? pair.key : pair.query);
    byId("gates-lane-block").hidden = !series;
    byId("gates-lane-side").textContent = view === "key" ? "key" : "query";
    if (series) gatesLane(byId("gates-lane"), box, series, trace.length);
    confidenceLane(byId("confidence-lane"), box, trace);
    this.step(this.player.at);
  }

  /** The same in the other theme's colours. */
  restyle(): void {
    if (this.trace) this.chooser.suggest(this.trace);
    this.redraw();
  }

  nextCursor(): void {
    const all = this.trace?.suggested() ?? [];
    const here = all.findIndex((one) => this.pair?.query.facts.index === one.index);
    if (all.length) void this.choose(all[(here + 1) % all.length]);
  }

  nextView(): void {
    const views = [...byId("views").querySelectorAll("input")].filter((one) => one.offsetParent);
    const here = views.findIndex((one) => one.checked);
    if (!views.length) return;
    this.setView(views[(here + 1) % views.length].value as View);
    this.redraw();
  }

  private setView(view: View): void {
    this.view = view;
    for (const one of byId("views").querySelectorAll("input")) one.checked = one.value === view;
  }

  private step(at: number): void {
    const { trace, pair, choice } = this;
    if (!trace) return;
    this.strip.step(at);
    this.figure.step(at);
    this.predictions.step(trace, at);
    this.gates.query.step(pair?.query ?? null, at);
    this.gates.key.step(pair?.key ?? null, at);
    const box = this.figure.box;
    if (box) byId("needle").style.transform = `translateX(${box.left + (at + 0.5) * box.cell}px)`;
    const words = told(trace, pair, choice.layer, choice.head, at);
    byId("told").textContent = words;
    if (!this.player.playing) byId("spoken").textContent = words; // a screen reader cannot follow a film
  }

  private verdict(trace: Trace): void {
    const { verdict, right, note } = trace.raw;
    const chip = byId("verdict");
    chip.textContent = VERDICTS[verdict];
    chip.className = `verdict ${verdict}`;
    byId("answer").textContent = verdict === "wrong" && right !== null ? `the answer is ${right}` : "";
    byId("note").textContent = note ?? "";
  }

  private async choose(wanted: Choice): Promise<void> {
    const { trace } = this;
    if (!trace) return;
    const turn = ++this.turn;
    const there = trace.queries.filter((one) => one.layer === wanted.layer && one.head === wanted.head);
    let query = there.find((one) => one.cursor === wanted.cursor) ?? there[0];
    if (query && trace.missing(query).length) {
      if (this.live) await this.attempt(async () => this.fetchCursors(trace, query));
      else query = there.find((one) => trace.pair(one)) ?? query;
    }
    if (trace !== this.trace || turn !== this.turn) return; // another prompt or another choice has come meanwhile
    if (query && this.live && !trace.pair(query)) return this.redraw(); // it failed, and was said: all stays as it was
    this.see(trace, wanted, query && trace.pair(query) ? query : undefined);
    this.redraw();
  }

  private async fetchCursors(trace: Trace, query: CursorFacts): Promise<void> {
    byId("stage").setAttribute("aria-busy", "true");
    try {
      trace.add(await server.cursors(trace.raw.tokens, trace.missing(query)));
      if (trace === this.trace) this.chooser.suggest(trace);
    } finally {
      byId("stage").removeAttribute("aria-busy");
    }
  }

  /** From here on this head is shown, with this cursor if there is one. */
  private see(trace: Trace, { layer, head }: { layer: number; head: number }, query: CursorFacts | undefined): void {
    const { cursors, run } = trace.raw;
    this.pair = query ? trace.pair(query) : null;
    this.choice = { layer, head, cursor: query ? query.cursor : null };
    document.body.classList.toggle("no-pair", !this.pair);
    byId("no-cursors").textContent = this.pair ? ""
      : !cursors.length ? `This encoding, ${run.label}, has no cursors: here is what the model reads and what it says.`
      : cursors.some((one) => one.layer === layer) ? "This file holds no cursor of this head, only its attention."
      : `Layer ${layer} has no cursors.`;
  }

  /** Does something that the server may refuse; what it says then is shown. */
  private async attempt(work: () => Promise<void>): Promise<void> {
    try {
      this.fail("");
      await work();
    } catch (error) {
      this.fail(error instanceof Error ? error.message : String(error));
    }
  }

  private async export(): Promise<void> {
    const { trace, pair } = this;
    if (!trace) return;
    const button = byId<HTMLButtonElement>("export");
    button.disabled = true;
    await this.attempt(async () => {
      const { run, tokens, prompt } = trace.raw;
      const first = pair ? [pair.query.facts.index, pair.key.facts.index] : []; // the file opens with what is seen now
      const link = document.createElement("a");
      const shown = [...new Set([...first, ...trace.included])];
      link.href = URL.createObjectURL(await server.exported(tokens, prompt, shown));
      link.download = `prism-${run.name}.html`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    });
    button.disabled = false;
  }

  private followPointer(figure: HTMLElement): void {
    figure.addEventListener("pointermove", (event) => {
      const token = this.figure.probe(event);
      if (token !== null && event.buttons === 1) this.player.go(token);
    });
    figure.addEventListener("pointerdown", (event) => {
      const token = this.figure.probe(event);
      if (token !== null && event.button === 0) this.player.go(token);
    });
    figure.addEventListener("pointerleave", () => (byId("readout").textContent = ""));
  }
}
