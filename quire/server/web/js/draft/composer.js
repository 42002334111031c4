// Where a message is written, with what goes with it, and sent or stopped.

import { Attachments } from "./attachments.js";
import { $, say } from "../dom.js";

export class Composer {
  /** `actions`: submit(), stop(), problem(text), and blind(), why the model that is chosen reads no pictures. */
  constructor(actions) {
    this.attachments = new Attachments(actions.problem, actions.blind);
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      actions.submit();
    });
    $("stop-button").addEventListener("click", () => actions.stop());
    $("playground").addEventListener("keydown", (event) => {
      if (event.key === "Escape") actions.stop();
      const sends = event.target.id === "draft" && !event.shiftKey;
      const sendsPrompt = event.target.id === "prompt" && (event.ctrlKey || event.metaKey);
      if (event.key === "Enter" && !event.isComposing && (sends || sendsPrompt)) {
        event.preventDefault();
        actions.submit();
      }
    });
  }

  /** The user's message as it stands; null where there is none. */
  get message() {
    const content = $("draft").value;
    const { fields } = this.attachments;
    return content.trim() || Object.keys(fields).length ? { role: "user", content, ...fields } : null;
  }

  clear() {
    $("draft").value = "";
    this.attachments.empty();
  }

  /** Takes back a message that the server refused, unless another one was begun meanwhile. Whether it did. */
  restore(message) {
    if (this.message) return false;
    $("draft").value = message.content;
    this.attachments.restore(message);
    return true;
  }

  /** For a conversation, or for a text that is continued. */
  setMode(chat) {
    this.chat = chat;
    $("draft").hidden = !chat;
    $("draft").disabled = !chat;
    $("attach-label").hidden = !chat;
    $("attached").hidden = !chat || !this.attachments.taken.length;
    $("composer").classList.toggle("bare", !chat);
    $("send").textContent = chat ? "Send" : "Continue it";
    $("hint").firstElementChild.textContent = chat ? "Enter" : "Ctrl+Enter";
  }

  setRunning(running) {
    $("send").hidden = running;
    $("stop-button").hidden = !running;
    if (running && document.activeElement === $("send")) $("stop-button").focus();
    else if (!running && document.activeElement === document.body) this.focus();
    if (running) say($("said"), "The model is writing");
  }

  /** To where one writes. */
  focus() {
    (this.chat ? $("draft") : $("prompt")).focus({ preventScroll: true });
  }
}
