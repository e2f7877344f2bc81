// Colours: CSS says them, once; canvases read them from there. Mass and weights go through one curve everywhere.

import { interpolateCividis } from "d3-scale-chromatic";

export type Rgb = [number, number, number];

export interface Palette {
  dark: boolean;
  css: (name: string) => string;
  rgb: (name: string) => Rgb;
}

function parsed(colour: string): Rgb {
  const hex = colour.trim().match(/^#(..)(..)(..)$/);
  if (hex) return hex.slice(1).map((part) => parseInt(part, 16)) as Rgb;
  return (colour.match(/\d+/g) ?? ["0", "0", "0"]).slice(0, 3).map(Number) as Rgb;
}

export function palette(): Palette {
  const style = getComputedStyle(document.documentElement);
  const css = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return { dark: css("scheme") === "dark", css, rgb: (name) => parsed(css(name)) };
}

/** How strongly a mass of 0..1 is drawn: thin mass must stay visible beside a peak. The legend shows the same curve. */
export const strength = (mass: number): number => Math.pow(mass, 0.6);

const STRENGTH = Float32Array.from({ length: 256 }, (_, byte) => strength(byte / 255));

/** 256 colours, perceptually ordered and the same to colour-blind eyes. */
const CIVIDIS: Rgb[] = Array.from({ length: 256 }, (_, byte) => parsed(interpolateCividis(strength(byte / 255))));

/** The colour of a scale at 0..1 of its length: `cividis`, or one ink on the map's paper. */
export function ramp(scale: string, along: number, colours: Palette): string {
  if (scale === "cividis") return interpolateCividis(along);
  const [paper, ink] = [colours.rgb("map"), colours.rgb(scale)];
  return `rgb(${paper.map((base, channel) => Math.round(base + along * (ink[channel] - base))).join(" ")})`;
}

export function paintOne(mass: Uint8Array, into: Uint8ClampedArray): void {
  for (let i = 0; i < mass.length; i++) {
    const [red, green, blue] = CIVIDIS[mass[i]];
    into[4 * i] = red;
    into[4 * i + 1] = green;
    into[4 * i + 2] = blue;
    into[4 * i + 3] = 255;
  }
}

/** Query and key in one picture: inks on paper in the light, lights in the dark, so that both show where both are. */
export function paintBoth(query: Uint8Array, key: Uint8Array, into: Uint8ClampedArray, colours: Palette): void {
  const [paper, first, second] = [colours.rgb("map"), colours.rgb("query"), colours.rgb("key")];
  for (let i = 0; i < query.length; i++) {
    const [q, k] = [STRENGTH[query[i]], STRENGTH[key[i]]];
    for (let channel = 0; channel < 3; channel++) {
      const [base, one, other] = [paper[channel], first[channel], second[channel]];
      into[4 * i + channel] = colours.dark
        ? base + q * (one - base) + k * (other - base)
        : base * (1 - q * (1 - one / 255)) * (1 - k * (1 - other / 255));
    }
    into[4 * i + 3] = 255;
  }
}
