// Figures as the page shows them.

/** A whole number, its thousands apart. */
export const whole = (value) => Math.round(value).toLocaleString("en");

/** Milliseconds. */
export const ms = (value) =>
  value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`;

/** Bytes, as multiples of 1,024; `digits` behind the point of those below ten. */
export function size(bytes, digits = 1) {
  if (bytes < 1024) return `${bytes} bytes`;
  const power = Math.min(Math.floor(Math.log2(bytes) / 10), 3);
  const count = bytes / 1024 ** power;
  return `${count.toFixed(count < 10 ? digits : 0)} ${["", "KiB", "MiB", "GiB"][power]}`;
}
