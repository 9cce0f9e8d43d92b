from openai import OpenAI

client = OpenAI(
    base_url="https://taotoken.net/api",
    api_key="你的TaoToken Key",
)

resp = client.chat.completions.create(
    model="Qwen2.5-72B-Instruct",
    messages=[{"role": "user", "content": "写一个 Python 快速排序"}],
    max_tokens=200,
    temperature=0.7,
)
print(resp.choices[0].message.content)
