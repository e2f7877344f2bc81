// Around the heat map: where everything is, the ticks, the legend; and how numbers are written.

import { ramp, strength, type Palette } from "./colours";

/** Where things are, in CSS pixels. The lanes below the figure share `left`, `cell` and `across`. */
export interface Layout {
  width: number;
  left: number;
  across: number;
  cell: number;
  arcs: number;
  letters: number;
  top: number;
  down: number;
  profile: number;
  height: number;
}

export function layout(width: number, tokens: number, attended: boolean, profiled: boolean): Layout {
  const narrow = width < 600;
  const left = narrow ? 34 : 46;
  const profile = profiled ? (narrow ? 64 : 132) : 0;
  const across = width - left - profile - (profiled ? 10 : 8);
  const arcs = attended ? (narrow ? 64 : 84) : 8;
  const down = narrow ? 230 : 300;
  return { width, left, across, cell: across / tokens, arcs, letters: 24, top: arcs + 24, down, profile,
    height: arcs + 24 + down + 52 };
}

export function font(
  pen: CanvasRenderingContext2D, colours: Palette, colour: string, size: number, mono = false,
): void {
  pen.font = `${mono ? "600 " : ""}${size}px ${colours.css(mono ? "mono" : "sans")}`;
  pen.fillStyle = colours.css(colour);
}

/** Ticks of the map's rows, from `from` on; `y` says where a row is. */
export function sideTicks(
  pen: CanvasRenderingContext2D, box: Layout, colours: Palette, rows: { name: string; from: number; count: number },
  y: (row: number) => number,
): void {
  const step = round(rows.count / (box.down / 34));
  font(pen, colours, "soft", 11);
  [pen.textAlign, pen.textBaseline] = ["right", "middle"];
  for (let row = Math.ceil(rows.from / step) * step; row < rows.from + rows.count; row += step) {
    pen.fillText(rows.name === "offset" ? signed(row) : String(row), box.left - 6, y(row));
  }
  pen.textAlign = "left";
  pen.fillText(rows.name, 0, box.top - 12);
}

export function bottomTicks(pen: CanvasRenderingContext2D, box: Layout, colours: Palette, tokens: number): void {
  const step = round(tokens / (box.across / 60));
  font(pen, colours, "soft", 11);
  [pen.textAlign, pen.textBaseline] = ["center", "top"];
  for (let token = 0; token < tokens; token += step) {
    pen.fillText(String(token), box.left + (token + 0.5) * box.cell, box.top + box.down + 6);
  }
  pen.textAlign = "left";
  pen.fillText("token", 0, box.top + box.down + 6);
}

/** What the colours mean: shares of 0 to 1, on the curve by which they are painted. */
export function legend(
  pen: CanvasRenderingContext2D, box: Layout, colours: Palette, scales: string[], meaning: string,
): void {
  const [left, top, width] = [box.left, box.top + box.down + 28, 120];
  for (let x = 0; x < width; x++) {
    scales.forEach((scale, place) => {
      pen.fillStyle = ramp(scale, x / width, colours);
      pen.fillRect(left + x, top + (place * 10) / scales.length, 1, 10 / scales.length);
    });
  }
  font(pen, colours, "soft", 10);
  [pen.textAlign, pen.textBaseline] = ["center", "top"];
  for (const share of [0, 0.1, 0.5, 1]) pen.fillText(String(share), left + strength(share) * width, top + 13);
  pen.textAlign = "left";
  pen.fillText(meaning, left + width + 14, top);
}

/** 1, 2 or 5 times a power of ten, at least `least`. */
function round(least: number): number {
  for (let power = 1; ; power *= 10) for (const digit of [1, 2, 5]) if (digit * power >= least) return digit * power;
}

export const signed = (value: number): string => (value > 0 ? `+${value}` : value < 0 ? `−${-value}` : "0");

export function percent(share: number): string {
  const whole = share >= 0.9995 || share < 0.0005 || (share >= 0.0995 && share < 0.995);
  return `${(100 * share).toFixed(whole ? 0 : 1)}\u00a0%`;
}
