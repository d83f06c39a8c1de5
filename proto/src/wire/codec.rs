//! How gRPC turns messages into bytes and back: prost, behind the look at their limits.

use std::marker::PhantomData;

use prost::Message;
use prost::bytes::Buf;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::shape::Shaped;

/// What a stream allocates before it has said anything: a server holds thousands of them, and most messages are heartbeats.
const STREAM_BUFFER_BYTES: usize = 1 << 10;
/// Messages that are ready are written together up to this size.
const WRITE_TOGETHER_MAX_BYTES: usize = 32 << 10;

#[derive(Debug)]
pub(crate) struct BoundedCodec<Out, In>(PhantomData<(Out, In)>);

#[derive(Debug)]
pub(crate) struct Bounded<M>(PhantomData<M>);

impl<Out, In> Default for BoundedCodec<Out, In> {
    fn default() -> BoundedCodec<Out, In> {
        BoundedCodec(PhantomData)
    }
}

impl<Out, In> Codec for BoundedCodec<Out, In>
where
    Out: Message + Send + 'static,
    In: Message + Shaped + Default + Send + 'static,
{
    type Encode = Out;
    type Decode = In;
    type Encoder = Bounded<Out>;
    type Decoder = Bounded<In>;

    fn encoder(&mut self) -> Bounded<Out> {
        Bounded(PhantomData)
    }

    fn decoder(&mut self) -> Bounded<In> {
        Bounded(PhantomData)
    }
}

impl<M: Message> Encoder for Bounded<M> {
    type Item = M;
    type Error = Status;

    fn encode(&mut self, message: M, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        message
            .encode(into)
            .map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(STREAM_BUFFER_BYTES, WRITE_TOGETHER_MAX_BYTES)
    }
}

impl<M: Message + Shaped + Default> Decoder for Bounded<M> {
    type Item = M;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<M>, Status> {
        let bytes = from.copy_to_bytes(from.remaining());
        M::SHAPE
            .check(&bytes)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        M::decode(bytes)
            .map(Some)
            .map_err(|error| Status::invalid_argument(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(STREAM_BUFFER_BYTES, WRITE_TOGETHER_MAX_BYTES)
    }
}
