// The `openai` client in JavaScript, under node.
import assert from "node:assert/strict";
import OpenAI from "openai";

const URL_ = process.env.DOOR_URL;
const KEY = process.env.DOOR_KEY;
const SMALL_KEY = process.env.DOOR_SMALL_KEY;
const MODEL = "small";
const WORDS = [{ role: "user", content: "What is git?" }];
const client = new OpenAI({ baseURL: URL_, apiKey: KEY, maxRetries: 0, timeout: 60_000 });

const checks = {
  async chat() {
    const answer = await client.chat.completions.create({ model: MODEL, messages: WORDS, max_completion_tokens: 8 });
    assert.equal(answer.object, "chat.completion");
    assert.equal(answer.choices[0].message.role, "assistant");
    assert.ok(answer.usage.completion_tokens >= 1 && answer.usage.completion_tokens <= 8);
  },

  async chat_streamed_says_the_same_as_whole() {
    const asked = { model: MODEL, messages: WORDS, max_tokens: 12, temperature: 0 };
    const whole = await client.chat.completions.create(asked);
    let text = "";
    let usage = null;
    const stream = await client.chat.completions.create({
      ...asked, stream: true, stream_options: { include_usage: true },
    });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },

  async the_stream_helper_puts_a_chat_together() {
    const stream = client.chat.completions.stream({ model: MODEL, messages: WORDS, max_tokens: 8 });
    const final = await stream.finalChatCompletion();
    assert.ok(final.choices[0].message.content.length > 0);
  },

  async completion() {
    const asked = { model: MODEL, prompt: "git is", max_tokens: 6, temperature: 0 };
    const whole = await client.completions.create(asked);
    let text = "";
    for await (const chunk of await client.completions.create({ ...asked, stream: true })) {
      text += chunk.choices[0].text;
    }
    assert.equal(text, whole.choices[0].text);
  },

  async a_stream_that_is_left_takes_nothing_along() {
    for (let time = 0; time < 5; time += 1) {
      const stream = await client.chat.completions.create({
        model: MODEL, messages: WORDS, max_tokens: 400, stream: true,
      });
      for await (const _ of stream) break;
    }
    assert.ok(await client.chat.completions.create({ model: MODEL, messages: WORDS, max_tokens: 2 }));
  },

  async many_at_once() {
    const answers = await Promise.all(Array.from({ length: 16 }, (_, number) => client.completions.create({
      model: MODEL, prompt: `Number ${number} is`, max_tokens: 4,
    })));
    assert.ok(answers.every((answer) => ["stop", "length"].includes(answer.choices[0].finish_reason)));
  },

  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    assert.deepEqual(names, [MODEL]);
    assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
    for (const unknown of ["gpt-5", "org/model", "a model?"]) {
      await assert.rejects(client.models.retrieve(unknown), (error) => {
        assert.ok(error instanceof OpenAI.NotFoundError);
        assert.equal(error.code, "model_not_found");
        assert.ok(error.message.includes(unknown), error.message);
        return true;
      });
    }
  },

  async errors() {
    const stranger = new OpenAI({ baseURL: URL_, apiKey: "sk-sky-wrong", maxRetries: 0 });
    await assert.rejects(stranger.chat.completions.create({ model: MODEL, messages: WORDS }), (error) => {
      assert.ok(error instanceof OpenAI.AuthenticationError);
      assert.equal(error.code, "invalid_api_key");
      return true;
    });
    await assert.rejects(client.chat.completions.create({ model: "gpt-5", messages: WORDS }), OpenAI.NotFoundError);
    await assert.rejects(
      client.chat.completions.create({ model: MODEL, messages: WORDS, temperature: 9 }), OpenAI.BadRequestError,
    );
  },

  async over_quota_is_reported_and_its_wait_honoured() {
    const hasty = new OpenAI({ baseURL: URL_, apiKey: SMALL_KEY, maxRetries: 0 });
    const ask = (of) => of.completions.create({ model: MODEL, prompt: "x", max_tokens: 1 });
    let refused = null;
    for (let time = 0; time < 60 && refused === null; time += 1) {
      try {
        await ask(hasty);
      } catch (error) {
        assert.ok(error instanceof OpenAI.RateLimitError);
        refused = error;
      }
    }
    const wait = Number(refused.headers.get("retry-after-ms"));
    assert.ok(wait > 0 && wait <= 3000);
    const patient = new OpenAI({ baseURL: URL_, apiKey: SMALL_KEY, maxRetries: 1 });
    assert.ok((await ask(patient)).choices);
  },
};

const became = {};
for (const [name, run] of Object.entries(checks)) {
  try {
    await run();
    became[name] = "ok";
  } catch (error) {
    became[name] = String(error.stack ?? error);
  }
}
process.stdout.write(JSON.stringify(became));
