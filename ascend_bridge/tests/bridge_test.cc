// Drives bridge and targets on the simulator without Python and XLA, so that sanitizers see all of it.
//   scripts/sanitize_bridge.sh builds and runs this; the one argument is the simulator's path.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../../custom_calls/target.h"

using namespace deepinfer::ascend;
using namespace deepinfer::custom_calls;

namespace {

int num_failures = 0;

void Expect(bool holds, const char* what) {
  if (holds) return;
  ++num_failures;
  std::fprintf(stderr, "FAILED: %s\n", what);
}

Tensor Random(Call& call, DataType dtype, const Dims& dims) {
  Tensor tensor = call.Temporary(dtype, dims);
  std::vector<uint8_t> bytes(static_cast<size_t>(BytesOf(dtype, dims)));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 37 % 61 + 60);
  call.device().Upload(tensor, bytes.data());
  call.device().Synchronize();
  return tensor;
}

// An int32 tensor of given values.
Tensor Integers(Call& call, const Dims& dims, const std::vector<int32_t>& values) {
  Tensor tensor = call.Temporary(DataType::kInt32, dims);
  call.device().Upload(tensor, values.data());
  call.device().Synchronize();
  return tensor;
}

std::vector<Tensor> RunTarget(const Target& target, Call& call, std::vector<Tensor> inputs,
                              AttributeValues attributes) {
  const Request request(target, std::move(inputs), std::move(attributes));
  std::vector<Tensor> results = target.infer(request);
  for (size_t i = 0; i < results.size(); ++i) {
    results[i].address = target.is_in_place && i == 0 ? request.in(0).address
                                                      : call.Temporary(results[i].dtype, results[i].dims).address;
  }
  target.enqueue(request, call, results);
  call.device().Synchronize();
  return results;
}

void RunEveryTarget(Call& call) {
  const auto bf16 = [&](const Dims& dims) { return Random(call, DataType::kBf16, dims); };
  const auto bytes = [&](const Dims& dims) { return Random(call, DataType::kUint8, dims); };
  const auto f32 = [&](const Dims& dims) { return Random(call, DataType::kFloat, dims); };
  RunTarget(CopyTarget(), call, {bf16({3})}, {});
  RunTarget(RmsNormTarget(), call, {bf16({2, 64}), f32({64})}, {{"eps", 1e-6}});
  RunTarget(LinearTarget(), call, {bf16({2, 64}), bf16({5, 64})}, {});
  RunTarget(QuantizeMxfp8Target(), call, {bf16({2, 64})}, {{"scale_rule", int64_t{0}}});
  RunTarget(LinearMxfp8Target(), call, {bf16({2, 64}), bytes({5, 64}), bytes({5, 1, 2})}, {{"scale_rule", int64_t{1}}});
  RunTarget(RopeTarget(), call, {bf16({2, 3, 8}), f32({2, 4}), f32({2, 4})}, {});
  RunTarget(SwigluMxfp8Target(), call, {bf16({2, 512}), f32({2})}, {{"limit", 10.0}});
  RunTarget(ScatterRowsTarget(), call, {bytes({4, 8}), Integers(call, {1}, {2}), bytes({1, 8})}, {});
  RunTarget(RouterTarget(), call, {f32({2, 4}), f32({4})}, {{"k", int64_t{2}}, {"scaling", 1.5}, {"eps", 0.0}});
  RunTarget(ExpertProductsTarget(), call,
            {bytes({3, 64}), bytes({3, 1, 2}), bytes({2, 1, 1, 16, 32}), bytes({2, 16, 1, 2}),
             Integers(call, {2, 2}, {2, 0, 1, 0})},
            {});
  RunTarget(IndexTopKTarget(), call,
            {bytes({2, 3, 64}), bytes({2, 3, 2, 2}), f32({2, 3}), bytes({2, 4, 64}), bytes({2, 4, 2, 2}),
             Integers(call, {2}, {4, 1})},
            {{"k", int64_t{2}}});
  RunTarget(AttentionTarget(), call,
            {bf16({2, 3, 512}), bf16({2, 4, 512}), Integers(call, {2}, {4, 1}), f32({3}), bf16({2, 2, 512}),
             Integers(call, {2}, {0, 2})},
            {{"scale", 0.1}});
}

void PlanFault(Runtime& runtime, const char* place, const char* when, int status) {
  using SetFaults = int32_t(const char*);
  char plan[256] = "[]";
  if (place != nullptr) {
    std::snprintf(plan, sizeof plan,
                  "[{\"call\": \"%s\", \"code\": %d, \"message\": \"planned\", \"when\": \"%s\"}]", place, status, when);
  }
  reinterpret_cast<SetFaults*>(runtime.libraries().Find("sim_set_faults").address)(plan);
}

// A planned failure reaches the caller, and the device goes on or asks for a reset.
void FailAndGoOn(Runtime& runtime, const char* place, const char* when, int status, bool dirties,
                 const char* text = "planned") {
  Device& device = runtime.device(0);
  bool is_told = false;
  {
    std::lock_guard<std::mutex> lock(device.mutex);
    device.Enter();
    Call call(runtime, device);
    const Tensor x = Random(call, DataType::kFloat, {2, 8}), weight = Random(call, DataType::kFloat, {8});
    PlanFault(runtime, place, when, status);
    try {
      RunTarget(RmsNormTarget(), call, {x, weight}, {{"eps", 0.0}});
      call.DescribeList(x);
      call.IntArray({1, 2});
    } catch (const BridgeError& error) {
      is_told = std::strstr(error.what(), text) != nullptr;
    }
    PlanFault(runtime, nullptr, "", 0);
    device.arena().Rewind(0);
  }
  Expect(is_told, place);
  std::lock_guard<std::mutex> lock(device.mutex);
  if (dirties) device.Reset();
  device.Enter();
}

// Memory that could not be let go of at once is free behind the next wait.
void FreeLater(Runtime& runtime, const char* place) {
  Device& device = runtime.device(0);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.Enter();
  Tensor tensor{DataType::kFloat, {4}, device.Allocate(16), Format::kNd, {}, {}};
  const float values[4] = {1, 2, 3, 4};
  device.Upload(tensor, values);
  PlanFault(runtime, place, "call", 207001);
  bool is_told = false;
  try {
    device.Free(tensor.address);
    device.Synchronize();
    device.Enter();
  } catch (const BridgeError& error) {
    is_told = std::strstr(error.what(), place) != nullptr;
  }
  Expect(is_told, place);
  PlanFault(runtime, nullptr, "", 0);
  device.Synchronize();
  device.Enter();
}

void ShareBetweenThreads(Runtime& runtime) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&runtime, i] {
      Device& device = runtime.device(i % 2);
      for (int round = 0; round < 20; ++round) {
        std::lock_guard<std::mutex> lock(device.mutex);
        device.Enter();
        Call call(runtime, device);
        RunTarget(RmsNormTarget(), call, {Random(call, DataType::kFloat, {2, 8}), Random(call, DataType::kFloat, {8})},
                  {{"eps", 1e-6}});
        device.arena().Rewind(0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Both devices sum what they hold, each from a thread of its own.
void SumOverDevices(Runtime& runtime) {
  const int64_t family = runtime.groups().Add({{0, 1}});
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&runtime, family, i] {
      Device& device = runtime.device(i);
      std::lock_guard<std::mutex> lock(device.mutex);
      device.Enter();
      Call call(runtime, device);
      const AttributeValues attributes = {{"family", family}, {"size", int64_t{2}}};
      for (const Target* target : {&PsumTarget(), &AllGatherTarget(), &ReduceScatterTarget()}) {
        RunTarget(*target, call, {Random(call, DataType::kFloat, {4, 2})}, attributes);
      }
      device.arena().Rewind(0);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void KeepTensors(Runtime& runtime) {
  Device& device = runtime.device(0);
  HandleTable& handles = runtime.handles(0);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.Enter();
  Tensor tensor{DataType::kFloat, {4}, device.Allocate(16), Format::kNd, {}, {}};
  const Handle handle = handles.AddOwned(tensor);
  const Handle newer = handles.Advance(handle.data());
  bool is_stale = false;
  try {
    handles.Get(handle.data());
  } catch (const BridgeError& error) {
    is_stale = error.code() == Code::kFailedPrecondition;
  }
  Expect(is_stale, "an overtaken handle is stale");
  handles.Release(newer.data());
  Expect(handles.num_live() == 0, "a released tensor is gone");
}

std::string Violations(Runtime& runtime) {
  using Read = const char*();
  return reinterpret_cast<Read*>(runtime.libraries().Find("sim_violations").address)();
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) return 2;
  RuntimeOptions options;
  options.loader.simulator = words[1];
  options.device.arena_bytes = 1 << 22;
  Runtime::Open(options);
  {
    Runtime& runtime = Runtime::Get();
    {
      Device& device = runtime.device(0);
      std::lock_guard<std::mutex> lock(device.mutex);
      device.Enter();
      Call call(runtime, device);
      RunEveryTarget(call);
      device.arena().Rewind(0);
    }
    FailAndGoOn(runtime, "aclnnRmsNormGetWorkspaceSize", "call", 161002, false);
    FailAndGoOn(runtime, "aclnnRmsNorm", "call", 561103, false);
    FailAndGoOn(runtime, "aclnnRmsNorm", "async", 507015, true);
    FailAndGoOn(runtime, "aclrtSynchronizeStreamWithTimeout", "call", 107020, false);
    for (const char* place : {"aclCreateTensor", "aclCreateTensorList", "aclCreateIntArray"}) {
      FailAndGoOn(runtime, place, "call", 1, false, "made none");
    }
    for (const char* place :
         {"aclrtCreateEventExWithFlag", "aclrtRecordEvent", "aclrtDestroyEvent", "aclrtFree"}) {
      FreeLater(runtime, place);
    }
    ShareBetweenThreads(runtime);
    SumOverDevices(runtime);
    KeepTensors(runtime);
    Expect(Violations(runtime) == "[]", "no violation while open");
  }
  Runtime::Close();
  std::printf(num_failures == 0 ? "bridge test passed\n" : "bridge test FAILED\n");
  return num_failures == 0 ? 0 : 1;
}
