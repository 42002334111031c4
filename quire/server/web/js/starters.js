// What one may begin a conversation with.

const STORIES = [
  "Tell me a story about a fox.",
  "Tell me a story about a king who had three sons.",
  "Who lives in the dark forest?",
];
const TASKS = [
  "Explain recursion to a child, in three sentences.",
  "Write a Python function that finds the primes below n.",
  "What should one see in Lisbon in two days?",
];

/** Texts that fit the first of the models: the embedded one knows tales and nothing else. */
export const startersFor = (models) => (models[0] === "quire-demo" ? STORIES : TASKS);
