#include "registry.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

namespace hop_tf {
namespace {

void CopyShape(TF_ShapeInferenceContext* context, int input, int output, TF_Status* status) {
  const ShapePointer shape(TF_NewShapeHandle());
  TF_ShapeInferenceContextGetInput(context, input, shape.get(), status);
  if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextSetOutput(context, output, shape.get(), status);
}

void CheckVector(TF_ShapeInferenceContext* context, int input, TF_Status* status) {
  const ShapePointer shape(TF_NewShapeHandle());
  TF_ShapeInferenceContextGetInput(context, input, shape.get(), status);
  if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextWithRank(context, shape.get(), 1, shape.get(), status);
}

// A library that is being loaded cannot return an error, and one whose operations are missing must not be used.
void CheckRegistered(const char* operation, const TF_Status* status) {
  if (TF_GetCode(status) == TF_OK) return;
  std::fprintf(stderr, "hop_tf: TensorFlow refused the operation %s: %s\n", operation, TF_Message(status));
  std::abort();
}

void* CreateAttributes(TF_OpKernelConstruction* construction) {
  const StatusPointer status(TF_NewStatus());
  auto* attributes = new Attributes;
  // An operation without one of them keeps the default, which nobody looks at.
  TF_OpKernelConstruction_GetAttrFloat(construction, "spacing", &attributes->spacing, status.get());
  TF_OpKernelConstruction_GetAttrInt64(construction, "block_size", &attributes->block_size, status.get());
  TF_OpKernelConstruction_GetAttrBool(construction, "round_to_nearest", &attributes->round_to_nearest, status.get());
  return attributes;
}

void DestroyAttributes(void* attributes) { delete static_cast<Attributes*>(attributes); }

}  // namespace

std::vector<int64_t> Tensor::shape() const {
  std::vector<int64_t> dims(TF_NumDims(tensor_.get()));
  for (size_t i = 0; i < dims.size(); ++i) dims[i] = TF_Dim(tensor_.get(), static_cast<int>(i));
  return dims;
}

std::string Tensor::ShapeInWords() const {
  std::string words;
  for (const int64_t dim : shape()) words += (words.empty() ? "" : ", ") + std::to_string(dim);
  return "[" + words + "]";
}

void Check(bool condition, const std::string& message) {
  if (!condition) throw Failure{TF_INVALID_ARGUMENT, message};
}

void Check(HopTfStatus status, const char* reason) {
  switch (status) {
    case HOP_TF_OK:
      return;
    case HOP_TF_INVALID_ARGUMENT:
      throw Failure{TF_INVALID_ARGUMENT, "there must be at most 2^31 - 1 values."};
    case HOP_TF_OUT_OF_MEMORY:
      throw Failure{TF_RESOURCE_EXHAUSTED, "not enough memory for the kernel's tables."};
    case HOP_TF_DEVICE_ERROR:
      throw Failure{TF_INTERNAL, "the device refused the work: " + std::string(reason) + "."};
  }
}

HopTfType TypeOf(const Tensor& tensor) {
  switch (tensor.type()) {
    case TF_BFLOAT16:
      return HOP_TF_BFLOAT16;
    case TF_HALF:
      return HOP_TF_FLOAT16;
    default:
      return HOP_TF_FLOAT32;
  }
}

namespace {

size_t BytesOf(TF_DataType type) { return type == TF_FLOAT ? 4 : type == TF_UINT8 || type == TF_INT8 ? 1 : 2; }

// What `make(status)` returns, unless it fails.
template <typename Make>
Tensor Checked(const Make& make) {
  const StatusPointer status(TF_NewStatus());
  TF_Tensor* tensor = make(status.get());
  if (TF_GetCode(status.get()) != TF_OK) throw Failure{TF_GetCode(status.get()), TF_Message(status.get())};
  return Tensor(tensor);
}

}  // namespace

Tensor Call::Input(int index) const {
  return Checked([&](TF_Status* status) {
    TF_Tensor* tensor = nullptr;
    TF_GetInput(context_, index, &tensor, status);
    return tensor;
  });
}

Tensor Call::Output(int index, TF_DataType type, const std::vector<int64_t>& shape) const {
  size_t num_bytes = BytesOf(type);
  for (const int64_t dim : shape) num_bytes *= dim;
  return Checked([&](TF_Status* status) {
    return TF_AllocateOutput(context_, index, type, shape.data(), static_cast<int>(shape.size()), num_bytes, status);
  });
}

Tensor Call::ForwardedOutput(int index, int input, const std::vector<int64_t>& shape) const {
  return Checked([&](TF_Status* status) {
    int forwarded;
    return TF_ForwardInputOrAllocateOutput(context_, &input, 1, index, shape.data(), static_cast<int>(shape.size()),
                                           &forwarded, status);
  });
}

Tensor Call::Scratch(int64_t num_bytes) const {
  num_bytes = std::max<int64_t>(num_bytes, 1);  // A tensor of nothing need not have an address.
  return Checked([&](TF_Status* status) {
    TF_AllocatorAttributes attributes{sizeof(TF_AllocatorAttributes), 0};
    return TF_AllocateTemp(context_, TF_UINT8, &num_bytes, 1, &attributes, status);
  });
}

void InferShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
  if (TF_GetCode(status) == TF_OK) CopyShape(context, 0, 0, status);
  const bool has_vector = TF_ShapeInferenceContextNumInputs(context) > 1;
  if (TF_GetCode(status) == TF_OK && has_vector) CheckVector(context, 1, status);
}

void InferBothShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  InferShape(context, status);
  if (TF_GetCode(status) == TF_OK) CopyShape(context, 1, 1, status);
}

void RegisterOperation(const Operation& operation) {
  const StatusPointer status(TF_NewStatus());
  TF_OpDefinitionBuilder* builder = TF_NewOpDefinitionBuilder(operation.name);
  for (const char* each : operation.attributes) TF_OpDefinitionBuilderAddAttr(builder, each);
  for (const char* each : operation.inputs) TF_OpDefinitionBuilderAddInput(builder, each);
  for (const char* each : operation.outputs) TF_OpDefinitionBuilderAddOutput(builder, each);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, operation.infer_shapes);
  TF_RegisterOpDefinition(builder, status.get());
  CheckRegistered(operation.name, status.get());
}

void RegisterKernel(const char* operation, const char* device, void (*compute)(void*, TF_OpKernelContext*)) {
  const StatusPointer status(TF_NewStatus());
  TF_KernelBuilder* builder = TF_NewKernelBuilder(operation, device, CreateAttributes, compute, DestroyAttributes);
  TF_RegisterKernelBuilder(operation, builder, status.get());
  CheckRegistered(operation, status.get());
}

void Run(Kernel kernel, void* attributes, TF_OpKernelContext* context) {
  const StatusPointer status(TF_NewStatus());
  try {
    kernel(Call(context, *static_cast<const Attributes*>(attributes)));
    return;
  } catch (const Failure& failure) {
    TF_SetStatus(status.get(), failure.code, failure.message.c_str());
  } catch (const std::exception& error) {
    TF_SetStatus(status.get(), TF_INTERNAL, error.what());
  }
  TF_OpKernelContext_Failure(context, status.get());
}

}  // namespace hop_tf
