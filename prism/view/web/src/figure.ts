// The figure: attention arcs, the tokens, the heat map over them, and beside it the cursor as it stands now. Two
// canvases lie on one another: the map changes with the cursor, and what moves with every step is drawn over it.

import { bottomTicks, font, layout, legend, percent, sideTicks, signed, type Layout } from "./axes";
import { palette, type Palette } from "./colours";
import { attentionPicture, cursorPicture, type View } from "./raster";
import { FULL, meetings, peak, reach, type Pair, type Reading, type Series, type Trace } from "./trace";

export interface Scene {
  trace: Trace;
  pair: Pair | null;
  layer: number;
  head: number;
  view: View;
}

export class Figure {
  box: Layout | null = null;
  private readonly below: HTMLCanvasElement;
  private readonly above: HTMLCanvasElement;
  private scene: Scene | null = null;
  private colours: Palette = palette();
  private range: [number, number] = [0, 0];
  private at = 0;

  constructor(private readonly root: HTMLElement, private readonly say: (text: string) => void) {
    [this.below, this.above] = root.querySelectorAll("canvas") as unknown as [HTMLCanvasElement, HTMLCanvasElement];
  }

  /** Draws all of it: a new trace, cursor, view, size or theme. */
  show(scene: Scene, at: number): void {
    [this.scene, this.colours] = [scene, palette()];
    const { trace, pair, view } = scene;
    const width = this.root.parentElement!.clientWidth;
    const box = layout(width, trace.length, trace.attention.length > 0, view !== "attention" && pair !== null);
    this.box = box;
    this.root.style.height = `${box.height}px`;
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.below, this.above]) {
      [canvas.width, canvas.height] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
      canvas.getContext("2d")!.setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.range = pair ? reach(pair) : [0, 0];
    this.drawMap(box, ratio);
    this.step(at);
  }

  step(at: number): void {
    this.at = at;
    if (!this.scene || !this.box) return;
    const { trace, pair, view, layer, head } = this.scene;
    const pen = this.above.getContext("2d")!;
    pen.clearRect(0, 0, this.box.width, this.box.height);
    const reads = trace.reads(layer, head, at);
    const cursors = pair && view !== "attention" ? pair : null;
    this.drawPlayhead(pen, this.box);
    if (cursors) this.drawMeeting(pen, this.box, cursors, meetings(cursors, at));
    else this.drawRow(pen, this.box);
    this.drawArcs(pen, this.box, reads);
    this.drawLetters(pen, this.box, trace, reads);
  }

  /** The token under a pointer, if it is over the figure's tokens, and what is there in words. */
  probe(event: PointerEvent): number | null {
    if (!this.scene || !this.box) return null;
    const corner = this.root.getBoundingClientRect();
    const [x, y] = [event.clientX - corner.left - this.box.left, event.clientY - corner.top - this.box.top];
    const token = Math.floor(x / this.box.cell);
    if (token < 0 || token >= this.scene.trace.length) return null;
    const inside = y >= 0 && y < this.box.down;
    this.say(inside ? this.words(token, y) : `token ${token} “${this.scene.trace.raw.tokens[token]}”`);
    return token;
  }

  private words(token: number, y: number): string {
    const { trace, pair, view, layer, head } = this.scene!;
    const named = `token ${token} “${trace.raw.tokens[token]}”`;
    if (view === "attention" || !pair) {
      const reader = Math.floor((y / this.box!.down) * trace.length);
      if (token > reader) return `token ${reader} cannot see ${named} yet`;
      const weight = trace.attention[trace.row(layer, head, reader) + token] / FULL;
      return `token ${reader} reads ${named}: ${percent(weight)}`;
    }
    const offset = this.range[1] - Math.floor((y / this.box!.down) * (this.range[1] - this.range[0] + 1));
    const mass = (series: Series) => {
      const bin = offset - series.offset;
      return percent(bin >= 0 && bin < series.bins ? series.histogram[token * series.bins + bin] / FULL : 0);
    };
    return `${named}, offset ${signed(offset)}: query ${mass(pair.query)}, key ${mass(pair.key)}`;
  }

  private x(box: Layout, token: number): number {
    return box.left + (token + 0.5) * box.cell;
  }

  private y(box: Layout, offset: number): number {
    const rows = this.range[1] - this.range[0] + 1;
    return box.top + ((this.range[1] - offset + 0.5) / rows) * box.down;
  }

  private drawMap(box: Layout, ratio: number): void {
    const { trace, pair, view, layer, head } = this.scene!;
    const pen = this.below.getContext("2d")!;
    pen.clearRect(0, 0, box.width, box.height);
    const [wide, high] = [Math.floor(box.across * ratio), Math.floor(box.down * ratio)];
    pen.imageSmoothingEnabled = false;
    if (view === "attention" || !pair) {
      if (!trace.attention.length) return;
      const picture = attentionPicture(trace.attention, trace.row(layer, head, 0), trace.length, wide, high);
      pen.drawImage(picture, box.left, box.top, box.across, box.down);
      const rows = { name: "token", from: 0, count: trace.length };
      sideTicks(pen, box, this.colours, rows, (token) => box.top + ((token + 0.5) / trace.length) * box.down);
      legend(pen, box, this.colours, ["cividis"], "attention weight");
    } else {
      const picture = cursorPicture(pair, this.range, trace.length, view, box.across, box.down, this.colours);
      pen.drawImage(picture, box.left, box.top, box.across, box.down);
      const rows = { name: "offset", from: this.range[0], count: this.range[1] - this.range[0] + 1 };
      sideTicks(pen, box, this.colours, rows, (offset) => this.y(box, offset));
      const both = view === "both";
      const meaning = both ? "mass at an offset: query, key" : "mass at an offset";
      legend(pen, box, this.colours, both ? ["query", "key"] : ["cividis"], meaning);
    }
    pen.strokeStyle = this.colours.css("line");
    pen.strokeRect(box.left - 0.5, box.top - 0.5, box.across + 1, box.down + 1);
    bottomTicks(pen, box, this.colours, trace.length);
  }

  private drawPlayhead(pen: CanvasRenderingContext2D, box: Layout): void {
    const right = box.left + (this.at + 1) * box.cell;
    const { view, pair, trace } = this.scene!;
    pen.fillStyle = this.colours.css(view === "both" && pair ? "veil" : "shade"); // what has not happened yet
    if (view === "attention" || !pair) {
      const read = ((this.at + 1) / trace.length) * box.down;
      if (trace.attention.length) pen.fillRect(box.left, box.top + read, box.across, box.down - read);
    } else {
      pen.fillRect(right, box.top, Math.max(0, box.left + box.across - right), box.down);
    }
    pen.strokeStyle = this.colours.css(view === "both" && pair ? "ink" : "glow");
    pen.lineWidth = 1;
    pen.globalAlpha = 0.55;
    if (box.cell >= 4) pen.strokeRect(right - box.cell - 0.5, box.top - 2, box.cell + 1, box.down + 4);
    else this.line(pen, this.x(box, this.at), box.top - 2, this.x(box, this.at), box.top + box.down + 2);
    pen.globalAlpha = 1;
  }

  private line(pen: CanvasRenderingContext2D, x0: number, y0: number, x1: number, y1: number): void {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }

  /** The story: from where the query cursor stands now, straight back to the keys that stand there too. */
  private drawMeeting(pen: CanvasRenderingContext2D, box: Layout, pair: Pair, met: Reading[]): void {
    const here = peak(pair.query, this.at);
    const y = this.y(box, here.offset);
    const onMap = this.scene!.view === "both" ? "ink" : "glow";
    pen.lineWidth = 1.25;
    pen.strokeStyle = this.colours.css(onMap);
    for (const [place, { token, weight }] of met.slice(0, 12).entries()) {
      pen.globalAlpha = Math.max(0.25, weight);
      if (place === 0) {
        pen.setLineDash([4, 3]);
        if (token !== this.at) this.line(pen, this.x(box, this.at), y, this.x(box, token), y);
        this.line(pen, this.x(box, token), box.top, this.x(box, token), y - 7);
        pen.setLineDash([]);
      }
      pen.beginPath();
      pen.arc(this.x(box, token), this.y(box, peak(pair.key, token).offset), place === 0 ? 7 : 4, 0, 7);
      pen.stroke();
    }
    pen.globalAlpha = 1;
    pen.beginPath();
    pen.arc(this.x(box, this.at), y, 4.5, 0, 7);
    pen.fillStyle = this.colours.css("query");
    pen.fill();
    pen.strokeStyle = this.colours.css("map");
    pen.stroke();
    this.drawProfile(pen, box, pair, met[0]);
  }

  /** The current column as bars, on the map's own offset axis; the key that is met, outlined. */
  private drawProfile(pen: CanvasRenderingContext2D, box: Layout, pair: Pair, met: Reading | undefined): void {
    const left = box.left + box.across + 10;
    const full = box.profile - 4;
    const [low, high] = this.range;
    const thick = Math.max(1.5, Math.min(18, (box.down / (high - low + 1)) * 0.8));
    pen.fillStyle = this.colours.css("well");
    pen.fillRect(left, box.top, full, box.down);
    const bars = (series: Series, token: number, draw: (y: number, width: number) => void) => {
      for (let offset = low; offset <= high; offset++) {
        const bin = offset - series.offset;
        const mass = bin >= 0 && bin < series.bins ? series.histogram[token * series.bins + bin] : 0;
        if (mass) draw(this.y(box, offset) - thick / 2, (mass / FULL) * full);
      }
    };
    pen.fillStyle = this.colours.css("query");
    bars(pair.query, this.at, (y, width) => pen.fillRect(left, y, width, thick));
    if (met) {
      pen.strokeStyle = this.colours.css("key");
      pen.lineWidth = 2;
      bars(pair.key, met.token, (y, width) => pen.strokeRect(left, y - 1.5, width, thick + 3));
    }
    font(pen, this.colours, "query-ink", 11);
    [pen.textAlign, pen.textBaseline] = ["left", "alphabetic"];
    pen.fillText(box.profile < 100 ? "query" : "query, now", left, box.top - 20);
    font(pen, this.colours, "key-ink", 11);
    const named = met ? (box.profile < 100 ? `key ${met.token}` : `key of token ${met.token}`) : "meets no key";
    pen.fillText(named, left, box.top - 6);
    font(pen, this.colours, "soft", 11);
    pen.textBaseline = "top";
    pen.fillText("0", left, box.top + box.down + 6);
    pen.textAlign = "right";
    pen.fillText("1", left + full, box.top + box.down + 6);
  }

  private drawRow(pen: CanvasRenderingContext2D, box: Layout): void {
    if (!this.scene!.trace.attention.length) return;
    const high = box.down / this.scene!.trace.length;
    pen.strokeStyle = this.colours.css("glow");
    pen.lineWidth = 1;
    pen.strokeRect(box.left, box.top + this.at * high, (this.at + 1) * box.cell, Math.max(high, 1));
  }

  private drawArcs(pen: CanvasRenderingContext2D, box: Layout, reads: Reading[]): void {
    const floor = box.arcs - 1;
    const from = this.x(box, this.at);
    pen.strokeStyle = this.colours.css("attend");
    pen.lineCap = "round";
    for (const { token, weight } of reads) {
      pen.globalAlpha = 0.15 + 0.85 * weight;
      pen.lineWidth = 0.75 + 4.25 * weight;
      pen.beginPath();
      const to = this.x(box, token);
      if (token === this.at) pen.arc(from, floor - 6, 5, 0, 7);
      else {
        const rise = Math.min(floor - 6, 14 + Math.abs(from - to) * 0.35);
        pen.ellipse((from + to) / 2, floor, Math.abs(from - to) / 2, rise, 0, Math.PI, 2 * Math.PI);
      }
      pen.stroke();
    }
    pen.globalAlpha = 1;
    pen.lineCap = "butt";
  }

  private drawLetters(pen: CanvasRenderingContext2D, box: Layout, trace: Trace, reads: Reading[]): void {
    const { tokens, prompt } = trace.raw;
    const middle = box.arcs + box.letters / 2;
    pen.fillStyle = this.colours.css("completion");
    pen.fillRect(box.left + prompt * box.cell, box.arcs + 3, (tokens.length - prompt) * box.cell, box.letters - 6);
    pen.fillStyle = this.colours.css("prompt");
    pen.fillRect(box.left, box.arcs + 3, prompt * box.cell, box.letters - 6);
    [pen.textAlign, pen.textBaseline] = ["center", "middle"];
    const longest = Math.max(...tokens.map((token) => token.length));
    const size = Math.min(14, (box.cell / longest) * 1.3);
    for (let token = 0; token < tokens.length; token++) {
      const wrong = trace.isWrong(token);
      if (size >= 8) {
        font(pen, this.colours, wrong ? "wrong" : token > this.at ? "soft" : "ink", size, true);
        pen.fillText(tokens[token], this.x(box, token), middle);
      } else if (wrong) {
        pen.fillStyle = this.colours.css("wrong");
        pen.fillRect(box.left + token * box.cell, box.arcs + 3, Math.max(1, box.cell), box.letters - 6);
      }
    }
    const read = reads[0];
    if (read && read.weight > 0.3) this.bubble(pen, box, read.token, "attend", tokens);
    this.bubble(pen, box, this.at, "ink", tokens);
  }

  private bubble(pen: CanvasRenderingContext2D, box: Layout, token: number, colour: string, tokens: string[]): void {
    font(pen, this.colours, colour, 13, true);
    const width = Math.max(16, pen.measureText(tokens[token]).width + 8);
    const x = Math.min(Math.max(this.x(box, token), box.left + width / 2), box.left + box.across - width / 2);
    pen.beginPath();
    pen.roundRect(x - width / 2, box.arcs + 1, width, box.letters - 2, 4);
    pen.fill();
    pen.fillStyle = this.colours.css("paper");
    pen.fillText(tokens[token], x, box.arcs + box.letters / 2);
  }
}
