// The OpenAI SDK for Node against the server whose address is the first argument. Fails by throwing.
import assert from 'node:assert/strict'
import OpenAI from 'openai'
import { zodFunction, zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'none', maxRetries: 0 })
const model = 'quire-demo'
const messages = [{ role: 'user', content: 'What is the weather in Rome?' }]
const options = { model, messages, max_tokens: 200, seed: 3 }
const Place = z.object({ city: z.enum(['Rome', 'Oslo']), days: z.number().int().min(1).max(9) })

async function streams() {
  const whole = await client.chat.completions.create({ ...options, max_tokens: 12 })
  const stream = await client.chat.completions.create({
    ...options, max_tokens: 12, stream: true, stream_options: { include_usage: true },
  })
  let text = ''
  let usage = null
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? ''
    usage = chunk.usage ?? usage
  }
  assert.equal(text, whole.choices[0].message.content)
  assert.deepEqual(usage, whole.usage)

  const runner = client.chat.completions.stream({ ...options, max_tokens: 12 })
  const heard = []
  runner.on('content', (piece) => heard.push(piece))
  assert.equal((await runner.finalChatCompletion()).choices[0].finish_reason, 'length')
  assert.equal(heard.join(''), text)

  const plain = { model, prompt: 'Once upon a time', max_tokens: 8, temperature: 0 }
  let story = ''
  for await (const chunk of await client.completions.create({ ...plain, stream: true })) story += chunk.choices[0].text
  assert.equal(story, (await client.completions.create(plain)).choices[0].text)
}

async function parse() {
  const answer = await client.chat.completions.parse({
    ...options, response_format: zodResponseFormat(Place, 'place'),
  })
  Place.parse(answer.choices[0].message.parsed)
}

async function tools(stream, choice, calls) {
  const asked = []
  const weather = zodFunction({
    name: 'weather',
    description: 'The weather of the next days',
    parameters: Place,
    function: (place) => {
      asked.push(Place.parse(place))
      return `${place.days} days of rain in ${place.city}`
    },
  })
  const runner = client.chat.completions.runTools(
    { ...options, stream, tools: [weather], tool_choice: choice, parallel_tool_calls: false },
    { maxChatCompletions: 2 },
  )
  await runner.done()
  assert.equal(asked.length, calls)
  const roles = runner.messages.map((message) => message.role)
  assert.deepEqual(roles, ['user', ...Array(calls).fill(['assistant', 'tool']).flat()])
}

async function errors() {
  await assert.rejects(client.chat.completions.create({ ...options, model: 'gpt-5' }), OpenAI.NotFoundError)
  await assert.rejects(client.chat.completions.create({ ...options, temperature: 9 }), (error) => {
    return error instanceof OpenAI.BadRequestError && error.param === 'temperature'
  })
}

await streams()
await parse()
for (const stream of [false, true]) {
  await tools(stream, 'required', 2)
  await tools(stream, { type: 'function', function: { name: 'weather' } }, 1)
}
await errors()
