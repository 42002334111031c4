// The OpenAI SDK for Node against the server whose address is the first argument. Fails by throwing.
import assert from 'node:assert/strict'
import OpenAI from 'openai'
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod'
import { ResponsesWS } from 'openai/resources/responses/ws'
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

async function responses() {
  const asked = { model, input: 'Once upon a time', max_output_tokens: 12, temperature: 0 }
  const whole = await client.responses.create(asked)
  let text = ''
  let number = 0
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    assert.equal(event.sequence_number, number++)
    if (event.type === 'response.output_text.delta') text += event.delta
  }
  assert.equal(text, whole.output_text)
  const parsed = await client.responses.parse({
    model, input: 'Rome?', text: { format: zodTextFormat(Place, 'place') },
  })
  Place.parse(parsed.output_parsed)
}

async function loop() {
  const tool = zodResponsesFunction({ name: 'weather', parameters: Place })
  const input = [...messages]
  const asked = { model, input, tools: [tool], max_output_tokens: 200, parallel_tool_calls: false }
  const answer = await client.responses.parse({ ...asked, tool_choice: 'required' })
  const [call] = answer.output
  assert.equal(call.type, 'function_call')
  Place.parse(call.parsed_arguments)
  input.push({ type: 'function_call', call_id: call.call_id, name: call.name, arguments: call.arguments })
  input.push({ type: 'function_call_output', call_id: call.call_id, output: 'Rain' })
  const runner = client.responses.stream({ ...asked, tool_choice: 'none', max_output_tokens: 8 })
  let text = ''
  runner.on('response.output_text.delta', (event) => { text += event.delta })
  const last = await runner.finalResponse()
  assert.equal(text, last.output_text)
  const plain = await client.responses.create({ model, input: messages, max_output_tokens: 1 })
  assert.ok(last.usage.input_tokens > plain.usage.input_tokens, 'the call and its result are shown')
}

async function websocket() {
  const socket = new ResponsesWS(client)
  const events = socket.stream()
  const answer = async (fields) => {
    socket.send({ type: 'response.create', model, max_output_tokens: 12, temperature: 0, store: false, ...fields })
    let text = ''
    for (;;) {
      const { value, done } = await events.next()
      assert.ok(!done && value.type !== 'close', 'the connection stays open')
      if (value.type === 'error') return value.error.error.error
      if (value.type !== 'message') continue
      if (value.message.type === 'response.output_text.delta') text += value.message.delta
      if (!['response.completed', 'response.incomplete'].includes(value.message.type)) continue
      const { response } = value.message
      assert.equal(response.output.flatMap((item) => item.content).map((part) => part.text).join(''), text)
      return response
    }
  }
  const input = [{ role: 'user', content: 'Tell me of a fox and a crow who share one tall tree.' }]
  const first = await answer({ input })
  const second = await answer({ input: 'Tell me more.', previous_response_id: first.id })
  const talk = [...input, ...first.output, { role: 'user', content: 'Tell me more.' }]
  const whole = await client.responses.create({ model, max_output_tokens: 12, temperature: 0, input: talk })
  assert.deepEqual(second.output[0].content, whole.output[0].content)
  assert.equal(second.usage.input_tokens, whole.usage.input_tokens)
  assert.ok(second.usage.input_tokens_details.cached_tokens > 0, 'the first turn is cached')
  const error = await answer({ input: 'Hi', previous_response_id: 'resp_0' })
  assert.equal(error.code, 'previous_response_not_found')
  socket.close()
}

async function embeddings() {
  const input = ['The fox sleeps.', 'A crow sings in the rain.']
  const vectors = async (fields) => {
    const answer = await client.embeddings.create({ model, input, ...fields })
    return answer.data.map((each) => each.embedding)
  }
  const floats = await vectors({ encoding_format: 'float' })
  assert.deepEqual(await vectors({}), floats) // base64 unasked, which the SDK decodes
  const short = await vectors({ dimensions: 8 })
  assert.deepEqual(short.map((each) => each.length), [8, 8])
  await assert.rejects(vectors({ dimensions: 1e6 }), (error) => error.param === 'dimensions')
}

async function errors() {
  await assert.rejects(client.chat.completions.create({ ...options, model: 'gpt-5' }), OpenAI.NotFoundError)
  await assert.rejects(client.chat.completions.create({ ...options, temperature: 9 }), (error) => {
    return error instanceof OpenAI.BadRequestError && error.param === 'temperature'
  })
}

await streams()
await parse()
await responses()
await loop()
await websocket()
await embeddings()
for (const stream of [false, true]) {
  await tools(stream, 'required', 2)
  await tools(stream, { type: 'function', function: { name: 'weather' } }, 1)
}
await errors()
