import torch, ballast
torch.manual_seed(0)
import copy
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
for stage in range(4):
    plain = build(); popt = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, optimizer, _, _ = ballast.initialize(model=model, optimizer=opt, config={"zero_optimization": {"stage": stage}, "managed_gradient_accumulation": False}, device="cpu")
    for step in range(3):
        x = torch.randn(5, 8); y = torch.randn(5,4)
        for k in range(2):
            loss = (engine(x) - y).square().mean()
            if k: loss.backward()
            else: engine.backward(loss)
            (((plain(x) - y).square().mean())/2).backward()
        r = engine.step(); popt.step(); popt.zero_grad()
        assert r.micro_batches == 2, r
    for (n, p), (_, q) in zip(model.named_parameters(), plain.named_parameters()):
        full = ballast.safe_get_full_fp32_param(p)
        assert torch.allclose(full, q, atol=1e-6), (stage, n, (full - q).abs().max())
    print(stage, r, engine.get_lr(), optimizer)
    engine.destroy()
    assert torch.allclose(model[0].weight, plain[0].weight, atol=1e-6)
with ballast.zero.Init():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
print(model[0].weight.device)
r1 = torch.rand(1)
ref = build()
r2 = torch.rand(1)
assert r1 == r2
engine, *_ = ballast.initialize(model=model, config={"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, device="cpu")
for (n, p), (_, q) in zip(model.named_parameters(), ref.named_parameters()):
    assert torch.equal(ballast.safe_get_full_fp32_param(p), q), n
print("init ok", engine.memory()["device"])
