// The page: a live model behind a prompt, or one recorded trace in the page itself.

import { Asking } from "./asking";
import { listen, type Action } from "./keys";
import { Stage } from "./stage";
import { startTheme } from "./theme";
import { Trace, type RawTrace } from "./trace";

const byId = <Kind extends HTMLElement>(id: string) => document.getElementById(id) as Kind;

function begin(): void {
  const recorded = document.getElementById("trace");
  const stage = new Stage(recorded === null);
  const theme = startTheme(byId<HTMLButtonElement>("theme"), () => stage.restyle());
  const help = byId<HTMLDialogElement>("help");
  byId("keys").addEventListener("click", () => help.showModal());
  const asking = recorded ? null : new Asking(stage);

  const others: Partial<Record<Action, () => void>> = {
    play: () => stage.player.toggle(), cursor: () => stage.nextCursor(), view: () => stage.nextView(),
    prompt: () => asking?.focus(), theme: () => theme.toggle(), help: () => help.showModal(),
  };
  listen((action) => (others[action] ?? (() => stage.player.step(action)))());

  if (recorded) {
    try {
      stage.show(new Trace(JSON.parse(recorded.textContent!) as RawTrace));
    } catch (error) {
      stage.fail(error instanceof Error ? error.message : String(error));
    }
  } else {
    void asking!.begin();
  }
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
else begin();
