// What the page asks of the server it came from. Every request carries the token that the served page holds.

import type { CursorData, RawTrace, RunFacts } from "./trace";

export interface Start {
  run: RunFacts;
  examples: { prompt: string; length: number }[];
  symbols: string[];
  longest: number;
}

export type Line = { token: string; top: [string, number][] } | { trace: RawTrace } | { error: string };

/** An answer that says no; the message is the server's sentence. */
export class Refused extends Error {}

/** What the server put into a <meta> tag of the page, or null. */
export const given = (name: string): string | null =>
  document.querySelector<HTMLMetaElement>(`meta[name="prism-${name}"]`)?.content ?? null;

async function post(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Prism-Token": given("token") ?? "" },
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused("The server does not answer: is `prism view` still running?");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refused(said?.error ?? `The server answered ${response.status}.`);
}

export const start = async (): Promise<Start> => (await post("api/run", {})).json();

export const cursors = async (tokens: string[], wanted: number[]): Promise<CursorData> =>
  (await post("api/cursors", { prompt_tokens: tokens, cursors: wanted })).json();

/** One file with the trace of these tokens, of which the first `prompt` are the prompt, and with these cursors. */
export const exported = async (tokens: string[], prompt: number, shown: number[]): Promise<Blob> =>
  (await post("api/export", { tokens, prompt, ...(shown.length ? { cursors: shown } : {}) })).blob();

/** The lines of an answer as they come: tokens, then the trace. */
export async function* stream(prompt: string, signal: AbortSignal): AsyncGenerator<Line> {
  const response = await post("api/stream", { prompt, limit: null }, signal);
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const lines = (rest + (value ?? "")).split("\n");
      rest = done ? "" : lines.pop()!;
      for (const line of lines) if (line.trim()) yield JSON.parse(line) as Line;
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
