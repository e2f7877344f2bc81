// What changes over the tokens, under the figure and on its axis: the gates, and how sure the model was. Drawn by
// Observable Plot when the cursor changes; a step only moves the line over them.

import { areaY, axisY, dot, lineY, plot, ruleY, type Markish } from "@observablehq/plot";

import { palette } from "./colours";
import type { Layout } from "./axes";
import { FULL, GATES, type Series, type Trace } from "./trace";

function drawn(into: HTMLElement, box: Layout, tokens: number, height: number, marks: Markish[], label: string): void {
  const svg = plot({
    width: box.width, height, marginLeft: box.left, marginRight: box.width - box.left - box.across,
    marginTop: 4, marginBottom: 4, x: { domain: [0, tokens], axis: null }, y: { domain: [0, 1], axis: null },
    marks: [axisY({ ticks: [0, 1], tickFormat: String, tickSize: 0, label: null, fill: "currentColor" }), ...marks],
  });
  svg.querySelector("style")?.remove(); // the page's policy allows no style element; style.css says the same
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  into.replaceChildren(svg);
}

interface Share {
  token: number;
  gate: string;
  share: number;
}

/** The gates as areas that add up to 1, and going home as a line over them. */
export function gatesLane(into: HTMLElement, box: Layout, series: Series, tokens: number): void {
  const colours = palette();
  const shares: Share[] = [];
  const homes: Share[] = [];
  for (let edge = 0; edge <= tokens; edge++) {
    const at = Math.min(edge, tokens - 1) * GATES.length; // the last token's step needs its right edge
    for (let gate = 0; gate < 3; gate++) {
      shares.push({ token: edge, gate: GATES[gate], share: series.gates[at + gate] / FULL });
    }
    homes.push({ token: edge, gate: "reset", share: series.gates[at + 3] / FULL });
  }
  drawn(into, box, tokens, 52, [
    areaY(shares, {
      x: "token", y: "share", z: "gate", order: ["decrement", "keep", "increment"], curve: "step-after",
      fill: (one: Share) => colours.css(one.gate), fillOpacity: 0.8,
    }),
    lineY(homes, { x: "token", y: "share", stroke: colours.css("ink"), strokeWidth: 1.25, curve: "step-after" }),
  ], `gates of the ${series.facts.side} cursor over all tokens`);
}

/** The probability the model gave to each token that came, and a mark where it was wrong. */
export function confidenceLane(into: HTMLElement, box: Layout, trace: Trace): void {
  const colours = palette();
  const { tokens, predictions, prompt } = trace.raw;
  const said = tokens.slice(prompt).map((token, place) => {
    const index = prompt + place;
    const share = predictions[index - 1]?.find(([name]) => name === token)?.[1] ?? 0;
    return { token: index, share, wrong: trace.isWrong(index) };
  });
  const steps = said.length ? [...said, { ...said[said.length - 1], token: tokens.length }] : [];
  drawn(into, box, tokens.length, 44, [
    ruleY([0, 1], { stroke: colours.css("line") }),
    lineY(steps, { x: "token", y: "share", stroke: colours.css("ink"), strokeWidth: 1.25, curve: "step-after" }),
    dot(said.filter((one) => one.wrong), {
      x: (one) => one.token + 0.5, y: "share", symbol: "times", stroke: colours.css("wrong"), strokeWidth: 2, r: 3,
    }),
  ], "probability of each generated token");
}
