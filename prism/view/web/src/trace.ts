// A trace: one prompt and its completion, and what the model did at every token. The format is prism/view/trace.py's.

export interface Block {
  shape: number[];
  scale: number;
  data: string;
}

export interface RunFacts {
  name: string;
  task: string;
  label: string;
  max_length: number;
  parameters: number;
  step: number;
  start_token: boolean;
}

export interface CursorFacts {
  index: number;
  side: "query" | "key";
  layer: number;
  head: number;
  cursor: number;
  depth: number;
  alpha: number;
  gamma: number | null;
  copies: boolean;
  sharpness: number;
  importance: number;
}

export interface CursorData {
  shown: number[];
  offset: number;
  histograms: Block;
  gates: Block;
}

export interface RawTrace extends CursorData {
  format: number;
  run: RunFacts;
  tokens: string[];
  prompt: number;
  right: string | null;
  expected: string[] | null;
  verdict: "right" | "wrong" | "unknown";
  note: string | null;
  predictions: [string, number][][];
  layers: number;
  heads: number;
  attention: Block;
  cursors: CursorFacts[];
  seconds: { generate: number; record: number };
}

/** One cursor over all tokens. Row t of `histogram` holds `bins` values, the first at relative position `offset`. */
export interface Series {
  facts: CursorFacts;
  histogram: Uint8Array;
  offset: number;
  bins: number;
  gates: Uint8Array;
}

export interface Pair {
  query: Series;
  key: Series;
}

/** A token read at a step, and how much of it: by attention, or by a query cursor that meets its key. */
export interface Reading {
  token: number;
  weight: number;
}

export const FULL = 255; // a block's byte for 1, as every block of a trace has the scale 1/255
const TELLING = 0.02; // of the most important cursor's importance: less is not worth a card
export const GATES = ["increment", "keep", "decrement", "reset", "copy"] as const;

function bytes(block: Block): Uint8Array {
  const text = atob(block.data);
  const all = new Uint8Array(text.length);
  for (let i = 0; i < all.length; i++) all[i] = text.charCodeAt(i);
  const size = block.shape.reduce((product, one) => product * one, 1);
  if (size !== all.length) throw new Error(`a block of shape ${block.shape} came with ${all.length} values`);
  if (Math.abs(block.scale * FULL - 1) > 1e-6) for (let i = 0; i < size; i++) all[i] *= block.scale * FULL;
  return all;
}

export class Trace {
  readonly raw: RawTrace;
  readonly length: number;
  readonly attention: Uint8Array;
  private readonly series = new Map<number, Series>(); // in the order in which they came: most important first

  constructor(raw: RawTrace) {
    if (raw.format !== 1) throw new Error(`this page shows traces of format 1; this one has ${raw.format}`);
    this.raw = raw;
    this.length = raw.tokens.length;
    this.attention = bytes(raw.attention);
    this.add(raw);
  }

  /** Takes in the data of more cursors. */
  add(more: CursorData): void {
    if (!more.shown.length) return;
    const [, tokens, bins] = more.histograms.shape;
    const [histograms, gates] = [bytes(more.histograms), bytes(more.gates)];
    more.shown.forEach((index, place) => {
      this.series.set(index, {
        facts: this.raw.cursors[index],
        histogram: histograms.subarray(place * tokens * bins, (place + 1) * tokens * bins),
        offset: more.offset,
        bins,
        gates: gates.subarray(place * tokens * GATES.length, (place + 1) * tokens * GATES.length),
      });
    });
  }

  get queries(): CursorFacts[] {
    return this.raw.cursors.filter((cursor) => cursor.side === "query");
  }

  partner(cursor: CursorFacts): CursorFacts {
    const { layer, head, cursor: number, side } = cursor;
    const found = this.raw.cursors.find(
      (one) => one.side !== side && one.layer === layer && one.head === head && one.cursor === number,
    );
    if (!found) throw new Error(`cursor ${number} of layer ${layer}, head ${head} has no partner`);
    return found;
  }

  /** The pair of a query cursor, or null while its data is not here. */
  pair(query: CursorFacts): Pair | null {
    const [one, other] = [this.series.get(query.index), this.series.get(this.partner(query).index)];
    return one && other ? { query: one, key: other } : null;
  }

  get included(): number[] {
    return [...this.series.keys()];
  }

  missing(query: CursorFacts): number[] {
    return [query.index, this.partner(query).index].filter((index) => !this.series.has(index));
  }

  /** Query cursors whose pair is here and that tell something beside the best of them, most important first. */
  suggested(): CursorFacts[] {
    const included = this.included.map((index) => this.raw.cursors[index]);
    const here = included.filter((one) => one.side === "query" && this.pair(one));
    const most = Math.max(...here.map((one) => one.importance));
    return here.filter((one, place) => place === 0 || one.importance >= TELLING * most);
  }

  /** Where row `at` of an attention head begins. */
  row(layer: number, head: number, at: number): number {
    return ((layer * this.raw.heads + head) * this.length + at) * this.length;
  }

  reads(layer: number, head: number, at: number): Reading[] {
    if (!this.attention.length) return [];
    const start = this.row(layer, head, at);
    const found: Reading[] = [];
    for (let token = 0; token <= at; token++) {
      const weight = this.attention[start + token] / FULL;
      if (weight > 0.015) found.push({ token, weight });
    }
    return found.sort((a, b) => b.weight - a.weight).slice(0, 24);
  }

  get completed(): string[] {
    return this.raw.tokens.slice(this.raw.prompt);
  }

  /** What token `index` should have been, if it was generated and the answer is known; "" past the answer's end. */
  expected(index: number): string | null {
    const { expected, prompt } = this.raw;
    return expected && index >= prompt ? (expected[index - prompt] ?? "") : null;
  }

  isWrong(index: number): boolean {
    const expected = this.expected(index);
    return expected !== null && index < this.length && expected !== this.raw.tokens[index];
  }
}

/** The offset with the most mass at a token, and that mass. */
export function peak(series: Series, at: number): { offset: number; mass: number } {
  const start = at * series.bins;
  let best = 0;
  for (let bin = 1; bin < series.bins; bin++) {
    if (series.histogram[start + bin] > series.histogram[start + best]) best = bin;
  }
  return { offset: series.offset + best, mass: series.histogram[start + best] / FULL };
}

/** How much the query cursor, as it stands at a token, overlaps with the key cursor of each token up to there. */
export function meetings({ query, key }: Pair, at: number): Reading[] {
  const start = at * query.bins;
  const found: Reading[] = [];
  const shift = query.offset - key.offset;
  const bins: number[] = [];
  for (let bin = 0; bin < query.bins; bin++) {
    const there = bin + shift >= 0 && bin + shift < key.bins;
    if (there && query.histogram[start + bin] > 0) bins.push(bin);
  }
  for (let token = 0; token <= at; token++) {
    let overlap = 0;
    for (const bin of bins) overlap += query.histogram[start + bin] * key.histogram[token * key.bins + bin + shift];
    const weight = overlap / FULL / FULL;
    if (weight > 0.05) found.push({ token, weight });
  }
  return found.sort((a, b) => b.weight - a.weight);
}

/** The offsets that matter to a pair: from the lowest to the highest where either ever has 2 % of its mass. */
export function reach({ query, key }: Pair): [number, number] {
  let [low, high] = [0, 0];
  for (const { histogram, bins, offset } of [query, key]) {
    for (let start = 0; start < histogram.length; start += bins) {
      for (let bin = 0; bin < bins; bin++) {
        if (histogram[start + bin] < 5) continue;
        if (offset + bin < low) low = offset + bin;
        if (offset + bin > high) high = offset + bin;
      }
    }
  }
  for (let more = true; high - low < 6; more = !more) more ? high++ : low--;
  return [low - 1, high + 1];
}
