// The prompt: typed or taken from an example; its completion comes token by token, then its trace.

import * as server from "./server";
import type { Stage } from "./stage";
import { Trace } from "./trace";

const byId = <Kind extends HTMLElement>(id: string) => document.getElementById(id) as Kind;

export class Asking {
  private readonly prompt = byId<HTMLInputElement>("prompt");
  private readonly run = byId<HTMLButtonElement>("run");
  private asked: AbortController | null = null;

  constructor(private readonly stage: Stage) {
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.prompt.blur(); // what follows is stepping, and its keys are the page's
      void this.ask(this.prompt.value);
    });
    byId("examples").addEventListener("click", (event) => {
      const chip = (event.target as HTMLElement).closest<HTMLButtonElement>("button");
      if (chip) void this.ask(chip.dataset.prompt!);
    });
  }

  /** Says what there is to ask, and asks what the command line gave or the first example, for something to see. */
  async begin(): Promise<void> {
    try {
      const { run, examples, symbols, longest } = await server.start();
      this.stage.facts(run);
      byId("symbols").textContent = `at most ${longest.toLocaleString("en")} tokens of ${shortened(symbols)}`;
      this.offer(examples, run.max_length);
      const first = server.given("prompt") ?? examples[0]?.prompt;
      if (first && !this.prompt.value && !this.asked) await this.ask(first);
    } catch (error) {
      this.fail(error);
    }
  }

  /** Examples of lengths that training has shown, and of lengths that it has not. */
  private offer(examples: server.Start["examples"], trained: number): void {
    const groups = [
      { said: "Examples of length", those: examples.filter(({ length }) => length <= trained) },
      { said: "longer than in training", those: examples.filter(({ length }) => length > trained) },
    ];
    const shown = groups.filter(({ those }) => those.length);
    byId("examples").replaceChildren(...shown.flatMap(({ said, those }) => [label(said), ...those.map(chip)]));
  }

  focus(): void {
    this.prompt.focus();
    this.prompt.select();
  }

  private async ask(prompt: string): Promise<void> {
    this.asked?.abort();
    const asked = (this.asked = new AbortController());
    this.prompt.value = prompt;
    this.fail("");
    this.busy(true);
    let shown = false;
    try {
      for await (const line of server.stream(prompt, asked.signal)) {
        if (this.asked !== asked) return;
        if ("error" in line) throw new server.Refused(line.error);
        if ("trace" in line) {
          shown = true;
          this.stage.show(new Trace(line.trace));
        } else {
          this.stage.arriving(prompt, line.token);
        }
      }
      if (!shown) throw new server.Refused("The server stopped before the trace was there.");
    } catch (error) {
      if (this.asked !== asked || asked.signal.aborted) return;
      this.stage.restore();
      this.fail(error);
    } finally {
      if (this.asked === asked) this.busy(false);
    }
  }

  private busy(busy: boolean): void {
    this.run.textContent = busy ? "Running…" : "Run";
    byId("stage").toggleAttribute("data-busy", busy);
  }

  private fail(error: unknown): void {
    const message = error instanceof Error ? error.message : String(error);
    this.stage.fail(message);
    this.prompt.setAttribute("aria-invalid", String(message !== ""));
  }
}

function label(text: string): HTMLElement {
  const span = document.createElement("span");
  span.className = "soft";
  span.textContent = text;
  return span;
}

function chip({ prompt, length }: { prompt: string; length: number }): HTMLElement {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "chip";
  button.dataset.prompt = prompt;
  button.title = prompt.length > 200 ? `${prompt.slice(0, 200)}…` : prompt;
  button.textContent = String(length);
  button.setAttribute("aria-label", `example of length ${length}`);
  return button;
}

function shortened(symbols: string[]): string {
  const shown = symbols.slice(0, 24).join(" ");
  return symbols.length > 24 ? `${shown} …` : shown;
}
