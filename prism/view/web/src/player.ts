// Where we are in the trace, and what moves it: buttons, the slider, the clock.

export class Player {
  at = 0;
  private length = 0;
  private timer = 0;
  private readonly slider: HTMLInputElement;
  private readonly play: HTMLButtonElement;
  private readonly place: HTMLElement;

  constructor(private readonly root: HTMLElement, private readonly moved: (at: number) => void) {
    this.slider = root.querySelector("input")!;
    this.play = root.querySelector<HTMLButtonElement>("#play")!;
    this.place = root.querySelector<HTMLElement>("#place")!;
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    root.addEventListener("click", (event) => {
      const button = (event.target as HTMLElement).closest("button");
      if (button?.id === "play") this.toggle();
      else if (button) this.step(button.dataset.step!);
    });
  }

  open(length: number, at: number): void {
    this.pause();
    this.length = length;
    this.slider.max = String(length - 1);
    this.root.hidden = false;
    this.set(at);
  }

  step(step: string): void {
    const target = { first: 0, back: this.at - 1, forward: this.at + 1, last: this.length - 1 }[step];
    if (target !== undefined) this.go(target);
  }

  /** Goes to a token, and stops playing: somebody wants to look. */
  go(at: number): void {
    this.pause();
    this.set(at);
  }

  get playing(): boolean {
    return this.timer !== 0;
  }

  toggle(): void {
    if (this.playing) return this.pause();
    if (this.length < 2) return;
    if (this.at >= this.length - 1) this.set(0);
    const wait = Math.max(40, Math.min(220, 15000 / this.length));
    this.timer = window.setInterval(() => {
      if (this.at >= this.length - 1) this.pause();
      else this.set(this.at + 1);
    }, wait);
    this.showPlaying();
  }

  pause(): void {
    if (!this.playing) return;
    window.clearInterval(this.timer);
    this.timer = 0;
    this.showPlaying();
    this.moved(this.at);
  }

  private showPlaying(): void {
    this.play.dataset.playing = this.playing ? "yes" : "no";
    this.play.setAttribute("aria-label", this.playing ? "Pause" : "Play");
  }

  private set(at: number): void {
    this.at = Math.max(0, Math.min(this.length - 1, at));
    this.slider.value = String(this.at);
    this.slider.setAttribute("aria-valuetext", `token ${this.at} of ${this.length - 1}`);
    this.place.textContent = `${this.at} / ${this.length - 1}`;
    this.moved(this.at);
  }
}
