// Which cursor is looked at: by layer, head and number, or by one click on those that tell most.

import { palette } from "./colours";
import { cursorPicture } from "./raster";
import { reach, type Trace } from "./trace";

const CARD = { width: 116, height: 52 };

function fill(select: HTMLSelectElement, values: number[], chosen: number, disabled: boolean[] = []): void {
  select.replaceChildren(...values.map((value, place) => {
    const option = new Option(String(value), String(value), false, value === chosen);
    option.disabled = disabled[place] ?? false;
    return option;
  }));
  select.disabled = values.length < 2;
}

const range = (count: number) => Array.from({ length: count }, (_, index) => index);

export interface Choice {
  layer: number;
  head: number;
  cursor: number | null;
}

export class Chooser {
  private readonly layer: HTMLSelectElement;
  private readonly head: HTMLSelectElement;
  private readonly cursor: HTMLSelectElement;
  private chosen: Choice = { layer: 0, head: 0, cursor: null };

  constructor(
    private readonly root: HTMLElement, private readonly cards: HTMLElement, choose: (choice: Choice) => void,
  ) {
    [this.layer, this.head, this.cursor] = root.querySelectorAll("select") as unknown as HTMLSelectElement[];
    root.addEventListener("change", () => choose({
      layer: Number(this.layer.value), head: Number(this.head.value),
      cursor: this.chosen.cursor === null ? null : Number(this.cursor.value),
    }));
    cards.addEventListener("click", (event) => {
      const card = (event.target as HTMLElement).closest<HTMLElement>("button");
      if (card) choose(JSON.parse(card.dataset.choice!) as Choice);
    });
  }

  /** Fills the lists. `whole`: any cursor can be had; otherwise only those whose data is here. A head without cursors
   * still shows its attention. */
  show(trace: Trace, chosen: Choice, whole: boolean): void {
    this.chosen = chosen;
    const { layer, head, cursor } = chosen;
    fill(this.layer, range(trace.raw.layers), layer);
    fill(this.head, range(trace.raw.heads), head);
    (this.cursor.parentElement as HTMLElement).hidden = cursor === null;
    if (cursor !== null) {
      const there = trace.queries.filter((one) => one.layer === layer && one.head === head);
      fill(this.cursor, there.map((one) => one.cursor), cursor, there.map((one) => !whole && !trace.pair(one)));
    }
    this.root.hidden = trace.raw.layers * trace.raw.heads === 0;
    for (const card of this.cards.querySelectorAll<HTMLElement>("button")) this.press(card);
  }

  /** A small picture of each suggested pair. */
  suggest(trace: Trace): void {
    const colours = palette();
    const ratio = window.devicePixelRatio || 1;
    this.cards.replaceChildren(...trace.suggested().map((facts) => {
      const pair = trace.pair(facts)!;
      const card = document.createElement("button");
      card.type = "button";
      card.className = "card";
      const { layer, head, cursor } = facts;
      card.dataset.choice = JSON.stringify({ layer, head, cursor });
      const picture = cursorPicture(
        pair, reach(pair), trace.length, "both", CARD.width, CARD.height, colours,
      );
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [CARD.width * ratio, CARD.height * ratio];
      const pen = canvas.getContext("2d")!;
      pen.imageSmoothingEnabled = false;
      pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
      canvas.setAttribute("aria-hidden", "true");
      const name = document.createElement("span");
      name.textContent = `layer ${layer} · head ${head} · ${cursor}`;
      const weight = document.createElement("span");
      weight.className = "soft";
      weight.textContent = `read with α = ${shortened(facts.alpha)}${facts.copies ? ", can jump" : ""}`;
      card.append(canvas, name, weight);
      card.setAttribute("aria-label", `layer ${layer}, head ${head}, cursor ${cursor}; ${weight.textContent}`);
      this.press(card);
      return card;
    }));
  }

  private press(card: HTMLElement): void {
    const { layer, head, cursor } = this.chosen;
    card.setAttribute("aria-pressed", String(card.dataset.choice === JSON.stringify({ layer, head, cursor })));
  }
}

function shortened(alpha: number): string {
  return alpha >= 0.05 ? alpha.toFixed(1) : "0";
}
