curl https://taotoken.net/api/v1/chat/completions \
  -H "Authorization: Bearer $TAOTOKEN_API_KEY" \
  -H "Content-Type: application/json" \
  -d '{
    "model": "qwen2.5-7b-awq",
    "messages": [{"role": "user", "content": "用一句话解释什么是 KV Cache"}],
    "max_tokens": 128,
    "temperature": 0.3,
    "stream": false
  }'
