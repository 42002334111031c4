// The models that are served: their names, what they read, and what they sample with where a request does not say.

import { call } from "./api.js";
import { $, el } from "./dom.js";
import { showDefaults } from "./settings/fields.js";

export class Models {
  constructor(settings) {
    this.settings = settings;
    this.cards = [];
  }

  get names() {
    return this.cards.map(({ id }) => id);
  }

  get #chosen() {
    return this.cards.find(({ id }) => id === this.settings.model);
  }

  /** Asks the server. Throws ApiError. */
  async load() {
    this.cards = (await (await call("/v1/models")).json()).data;
    const { names, settings } = this;
    if (!names.includes(settings.model)) settings.model = names[0] ?? "";
    $("model").replaceChildren(
      ...names.map((name) => el("option", { value: name, selected: name === settings.model }, name)),
    );
    this.chosen();
  }

  /** Another one was chosen. */
  chosen() {
    showDefaults(this.#chosen?.default_parameters ?? {});
  }

  /** Why the model that is chosen reads no pictures; "" where it does, or it is not known whether it does. */
  get blind() {
    const reads = this.#chosen?.architecture?.input_modalities;
    if (!reads || reads.includes("image")) return "";
    const seeing = this.cards.filter(({ architecture }) => architecture?.input_modalities.includes("image"));
    const others = seeing.length ? `; ${seeing.map(({ id }) => id).join(", ")} does` : "";
    return `the model ${this.settings.model} reads no pictures${others}.`;
  }
}
