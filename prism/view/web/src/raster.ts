// Heat maps as pictures of at most one pixel a cell: a 500-token map is painted once, and then only copied.

import { paintBoth, paintOne, type Palette } from "./colours";
import type { Pair, Series } from "./trace";

const THIN = 1.6; // CSS pixels: a cell is never smaller, or a sharp cursor becomes a hairline

export type View = "both" | "query" | "key" | "attention";

/** A table of bytes in a row: cell (x, y) stands at `start` + x * `right` + y * `down`. */
interface Table {
  data: Uint8Array;
  start: number;
  right: number;
  down: number;
  width: number;
  from: number; // the rows that there are, of `height`
  to: number;
  height: number;
}

/** Each cell is the largest value of the stretch of data it stands for, so that a thin line survives shrinking. */
function pooled(table: Table, columns: number, rows: number): Uint8Array {
  const { data, start, right, down, width, from, to, height } = table;
  const out = new Uint8Array(columns * rows);
  for (let x = 0; x < width; x++) {
    const column = Math.floor((x * columns) / width);
    for (let y = from; y < to; y++) {
      const mass = data[start + x * right + y * down];
      if (mass === 0) continue;
      const cell = Math.floor((y * rows) / height) * columns + column;
      if (mass > out[cell]) out[cell] = mass;
    }
  }
  return out;
}

function cells(series: Series, range: [number, number], tokens: number, columns: number, rows: number): Uint8Array {
  const { histogram, bins, offset } = series;
  const [top, height] = [range[1] - offset, range[1] - range[0] + 1];
  const [from, to] = [Math.max(0, top - bins + 1), Math.min(height, top + 1)];
  return pooled({ data: histogram, start: top, right: bins, down: -1, width: tokens, from, to, height }, columns, rows);
}

function picture(columns: number, rows: number, paint: (into: Uint8ClampedArray) => void): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [columns, rows];
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(columns, rows);
  paint(image.data);
  context.putImageData(image, 0, 0);
  return canvas;
}

/** A pair of cursors over all tokens, highest offset on top, for `width` x `height` CSS pixels. */
export function cursorPicture(
  pair: Pair, range: [number, number], tokens: number, view: View, width: number, height: number, colours: Palette,
): HTMLCanvasElement {
  const columns = Math.max(1, Math.min(tokens, Math.floor(width / THIN)));
  const rows = Math.max(1, Math.min(range[1] - range[0] + 1, Math.floor(height / THIN)));
  return picture(columns, rows, (into) => {
    if (view === "both") {
      const [query, key] = [pair.query, pair.key].map((one) => cells(one, range, tokens, columns, rows));
      paintBoth(query, key, into, colours);
    } else {
      paintOne(cells(view === "key" ? pair.key : pair.query, range, tokens, columns, rows), into);
    }
  });
}

/** A head's weights: the reading token downwards, the token read to the right. */
export function attentionPicture(
  weights: Uint8Array, start: number, tokens: number, width: number, height: number,
): HTMLCanvasElement {
  const columns = Math.max(1, Math.min(tokens, width));
  const rows = Math.max(1, Math.min(tokens, height));
  const table = { data: weights, start, right: 1, down: tokens, width: tokens, from: 0, to: tokens, height: tokens };
  return picture(columns, rows, (into) => paintOne(pooled(table, columns, rows), into));
}
