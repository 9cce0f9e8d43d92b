from openai import OpenAI

client = OpenAI(
    base_url="https://taotoken.net/api",
    api_key="sk-your-taotoken-key",
)

resp = client.chat.completions.create(
    model="qwen2-7b-local",
    messages=[
        {"role": "system", "content": "你是一个简洁的助手。"},
        {"role": "user", "content": "用一句话说明 vLLM 的 PagedAttention 解决了什么问题。"},
    ],
    temperature=0.3,
    max_tokens=128,
)
print(resp.choices[0].message.content)
